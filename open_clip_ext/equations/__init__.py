"""Every method as its paper prints it: plain PyTorch with autograd, on one process. Read this first.

One file per paper, named after it; what all share is in basics.py. These functions are slow and overflow in float32.
The losses of `create_loss` are fast and do not overflow; the tests compare them with these functions in float64.
`python -m open_clip_ext.equations` computes every method on eight pairs: see its source for the calls.

A step of a method is three lines (`neuclip_algorithm_1` is a whole training):

    g = batch_g(gaps(e1, e2), tau)         the batch's estimate of each anchor's normalizer
    u = sogclr_u(u, g, gamma, eps)         updates the estimate over the whole data set: old state in, new state out
    loss = fastclip_v3(g, tau, u, rho)     a scalar whose gradient by autograd is the paper's

method      | functions here, in the order of a step  | fast classes                              | test_*.py
----------- | --------------------------------------- | ----------------------------------------- | ------------------
clip        | clip                                    | ChunkedCLIPLoss                           | chunked
siglip      | siglip                                  | ChunkedSigLIPLoss                         | chunked
cyclip      | cyclip                                  | CyCLIPLoss                                | global_contrastive
dcl         | dcl                                     | BatchNormalizer, UnscaledTemperature      | global_contrastive
sogclr      | sogclr_u, sogclr                        | MovingAverageTable, FixedTemperature      | global_contrastive
isogclr     | isogclr_s, isogclr, isogclr_tau         | MovingAverageTable, IndividualTemperature | global_contrastive
fastclip-v0 | sogclr_u, fastclip_v0                   | MovingAverageTable, UnscaledTemperature   | global_contrastive
fastclip-v1 | sogclr_u, fastclip_v1                   | MovingAverageTable, FixedTemperature      | global_contrastive
fastclip-v2 | sogclr_u, fastclip_v2, fastclip_v2_tau  | MovingAverageTable, IndividualTemperature | global_contrastive
fastclip-v3 | sogclr_u, fastclip_v3                   | MovingAverageTable, LearnableTemperature  | global_contrastive
neuclip     | neuclip_w, neuclip_algorithm_1          | Prototypes                                | prototypes
neuclip     | neuclip_alpha, neuclip                  | Prototypes, Unified                       | global_contrastive
amorlip     | amorlip_z, amorlip_lambda, amorlip      | Amortization, AmorLIPLoss                 | amorlip
tuneclip    | tuneclip_phi, tuneclip_u, tuneclip      | MovingAverageTable, PowerHinge            | global_contrastive
queue       | queue_alpha, queue                      | Queue, Unified                            | queue
scent       | scent_gamma, scent_u, scent             | MovingAverageTable, LearnableTemperature  | global_contrastive
drrho-clip  | drrho_gaps, sogclr_u, drrho_clip        | GlobalContrastiveLoss, MovingAverageTable | global_contrastive
tempnet     | tempnet_tau, isogclr_s, tempnet         | NetworkTemperature, MovingAverageTable    | temperature

The last column names the file of tests/open_clip_ext that compares the two. `test_equations.py` compares the functions
here with double loops over the pairs. "Fast" in a docstring names the class that computes the same in training.
`superclip_weights` and `superclip` are what `--token-head` adds to any method's loss; `unicl`, and a global method's
step with `unicl_g` and `unicl_shift`, are what `--positives` makes of it.

in the papers                                              | here
---------------------------------------------------------- | ---------------------------------------------------
e_1i, e_2i; psi_I, psi_T: embeddings of image i and text i | e1, e2: (B, d), unit vectors
s_ij = <e_1i, e_2j>                                        | e1 @ e2.T
h_i: similarity of a negative minus that of the positive   | h: (2, B, B - 1); [0] images as anchors, [1] texts
g_1i, g_2i; Phi_1, Phi_2                                   | g, phi: (2, B)
u_1i, u_2i; s_v,i, s_t,i: moving averages                  | u, s: (2, B), the batch's rows of the table
alpha_1i, alpha_2i; lambda_I, lambda_T                     | alpha, lam: (2, B)
W_1, W_2: prototypes, the columns of a (d, m) matrix       | w1, w2: (m, d)
tau, tau_v,i, tau_t,i: temperatures                        | tau: 0-d, or (2, B) where each sample has its own
tau of AmorLIP, an inverse temperature                     | s: 0-d
S, D: the data set; B: the mini-batch                      | what e1 and e2 hold

The papers write the same in several notations. Equal up to a constant are

- the moving averages: u of `sogclr_u` is eps + s of `isogclr_s` and eps + u of `tuneclip_u`;
- the objectives: NeuCLIP, Eq. 1 is iSogCLR, Appendix B with one temperature, TuneCLIP, Eq. 9 without hinge (rho 0), and
  the least value of NeuCLIP, Eq. 12 over alpha;
- both directions: `clip` is half of TuneCLIP, Eq. 1 and of AmorLIP, Eq. 3, which are sums;
- the mean over the B - 1 negatives: `dcl` has their sum, and is 2 log(B - 1) above `fastclip_v0` with the batch's own g
  and without epsilon. TuneCLIP divides by B: with an epsilon B / (B - 1) times TuneCLIP's, division by B - 1 gives the
  same gradient and a value larger by 2 tau log(B / (B - 1)). AmorLIP's mean over all B has the positive, too:
  B Z_i = exp(s_ii / tau) (1 + (B - 1) g_i).

SogCLR and FastCLIP are cited as NeuCLIP prints them; docs/references.md has all papers. Where a paper is silent the
docstring says what is done here.
"""

from open_clip_ext.equations.amorlip import (
    amorlip,
    amorlip_beta,
    amorlip_kernel,
    amorlip_lambda,
    amorlip_mle,
    amorlip_networks,
    amorlip_objective,
    amorlip_z,
    amorlip_z_comb,
    js,
    kl,
)
from open_clip_ext.equations.basics import batch_g, clip, gaps, global_contrastive, gradient_of, siglip
from open_clip_ext.equations.cyclip import consistency, consistency_terms, cyclip
from open_clip_ext.equations.dcl import dcl
from open_clip_ext.equations.drrho import drrho_clip, drrho_gaps
from open_clip_ext.equations.fastclip import (
    fastclip_gamma,
    fastclip_v0,
    fastclip_v1,
    fastclip_v2,
    fastclip_v2_tau,
    fastclip_v3,
)
from open_clip_ext.equations.isogclr import isogclr, isogclr_objective, isogclr_s, isogclr_tau, two_view_gaps
from open_clip_ext.equations.neuclip import neuclip, neuclip_algorithm_1, neuclip_alpha, neuclip_separate, neuclip_w
from open_clip_ext.equations.queue import queue, queue_alpha
from open_clip_ext.equations.scent import scent, scent_gamma, scent_u
from open_clip_ext.equations.sogclr import sogclr, sogclr_u
from open_clip_ext.equations.superclip import superclip, superclip_weights
from open_clip_ext.equations.tempnet import tempnet, tempnet_tau
from open_clip_ext.equations.tuneclip import tuneclip, tuneclip_objective, tuneclip_phi, tuneclip_u
from open_clip_ext.equations.unicl import unicl, unicl_g, unicl_objective, unicl_shift

__all__ = [
    "amorlip", "amorlip_beta", "amorlip_kernel", "amorlip_lambda", "amorlip_mle", "amorlip_networks",
    "amorlip_objective", "amorlip_z", "amorlip_z_comb", "batch_g", "clip", "consistency", "consistency_terms",
    "cyclip", "dcl", "drrho_clip", "drrho_gaps", "fastclip_gamma", "fastclip_v0", "fastclip_v1", "fastclip_v2",
    "fastclip_v2_tau", "fastclip_v3", "gaps", "global_contrastive", "gradient_of", "isogclr", "isogclr_objective",
    "isogclr_s", "isogclr_tau", "js", "kl", "neuclip", "neuclip_algorithm_1", "neuclip_alpha", "neuclip_separate",
    "neuclip_w", "queue", "queue_alpha", "scent", "scent_gamma", "scent_u", "siglip", "sogclr", "sogclr_u",
    "superclip", "superclip_weights", "tempnet", "tempnet_tau", "tuneclip", "tuneclip_objective",
    "tuneclip_phi", "tuneclip_u", "two_view_gaps", "unicl", "unicl_g", "unicl_objective", "unicl_shift",
]
