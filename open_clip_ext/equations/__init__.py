"""Every method as its paper prints it: plain PyTorch with autograd, on one process. Read this first.

These functions are slow and overflow in float32. The losses of `create_loss` are fast and do not overflow; the tests
compare them with these functions in float64. `python -m open_clip_ext.equations` computes every method on eight pairs.

A step of a method is three lines:

    g = batch_g(gaps(e1, e2), tau)         the batch's estimate of each anchor's normalizer
    u = sogclr_u(u, g, gamma, eps)         updates the estimate over the whole data set: old state in, new state out
    loss = fastclip_v3(g, tau, u, rho)     a scalar whose gradient by autograd is the paper's

method      | functions here, in the order of a step  | fast classes                              | test_*.py
----------- | --------------------------------------- | ----------------------------------------- | ------------------
clip        | clip                                    | open_clip.loss.ClipLoss                   | equations
cyclip      | cyclip                                  | CyCLIPLoss                                | cyclip
dcl         | dcl                                     | BatchNormalizer, UnscaledTemperature      | temperature
sogclr      | sogclr_u, sogclr                        | MovingAverageTable, FixedTemperature      | temperature
isogclr     | isogclr_s, isogclr, isogclr_tau         | MovingAverageTable, IndividualTemperature | temperature
fastclip-v0 | sogclr_u, fastclip_v0                   | MovingAverageTable, UnscaledTemperature   | temperature
fastclip-v1 | sogclr_u, fastclip_v1                   | MovingAverageTable, FixedTemperature      | temperature
fastclip-v2 | sogclr_u, fastclip_v2, fastclip_v2_tau  | MovingAverageTable, IndividualTemperature | temperature
fastclip-v3 | sogclr_u, fastclip_v3                   | MovingAverageTable, LearnableTemperature  | global_contrastive
neuclip     | neuclip_w                               | Prototypes                                | prototypes
neuclip     | neuclip_alpha, neuclip                  | Prototypes, Unified                       | global_contrastive
amorlip     | amorlip_z, amorlip_lambda, amorlip      | Amortization, AmorLIPLoss                 | amorlip
tuneclip    | tuneclip_phi, tuneclip_u, tuneclip      | MovingAverageTable, PowerHinge            | temperature
queue       | queue_alpha, queue                      | Queue, Unified                            | queue
scent       | scent_gamma, scent_u, scent             | MovingAverageTable, LearnableTemperature  | neighbours
drrho-clip  | drrho_gaps, sogclr_u, drrho_clip        | GlobalContrastiveLoss, MovingAverageTable | neighbours
tempnet     | tempnet_tau, isogclr_s, tempnet         | NetworkTemperature, MovingAverageTable    | neighbours

The last column names the file of tests/open_clip_ext that compares the two. `test_equations.py` compares the functions
here with double loops over the pairs. "Fast" in a docstring names the class that computes the same in training.

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

Sources: CLIP, arXiv 2103.00020. CyCLIP, arXiv 2205.14459. DCL, arXiv 2110.06848. SogCLR, PMLR 162; its equations and
those of FastCLIP, arXiv 2407.01445, are cited as NeuCLIP prints them. iSogCLR, PMLR 202. NeuCLIP, arXiv 2511.08417.
AmorLIP, arXiv 2505.18983. TuneCLIP, arXiv 2601.09859. SCENT, arXiv 2602.02877. TempNet, arXiv 2404.04575. DRRho-CLIP,
arXiv 2505.06699. Where a paper is silent the docstring says what is done here.
"""

from open_clip_ext.equations.basics import (
    batch_g,
    clip,
    consistency,
    cyclip,
    dcl,
    gaps,
    global_contrastive,
    gradient_of,
    two_view_gaps,
)
from open_clip_ext.equations.neighbours import drrho_clip, drrho_gaps, scent, scent_gamma, scent_u, tempnet, tempnet_tau
from open_clip_ext.equations.networks import (
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
    neuclip,
    neuclip_alpha,
    neuclip_separate,
    neuclip_w,
    queue,
    queue_alpha,
)
from open_clip_ext.equations.tables import (
    fastclip_gamma,
    fastclip_v0,
    fastclip_v1,
    fastclip_v2,
    fastclip_v2_tau,
    fastclip_v3,
    isogclr,
    isogclr_objective,
    isogclr_s,
    isogclr_tau,
    sogclr,
    sogclr_u,
    tuneclip,
    tuneclip_objective,
    tuneclip_phi,
    tuneclip_u,
)

__all__ = [
    "amorlip", "amorlip_beta", "amorlip_kernel", "amorlip_lambda", "amorlip_mle", "amorlip_networks",
    "amorlip_objective", "amorlip_z", "amorlip_z_comb", "batch_g", "clip", "consistency", "cyclip", "dcl",
    "drrho_clip", "drrho_gaps", "fastclip_gamma", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v2_tau",
    "fastclip_v3", "gaps", "global_contrastive", "gradient_of", "isogclr", "isogclr_objective", "isogclr_s",
    "isogclr_tau", "js", "kl", "neuclip", "neuclip_alpha", "neuclip_separate", "neuclip_w", "queue", "queue_alpha",
    "scent", "scent_gamma", "scent_u", "sogclr", "sogclr_u", "tempnet", "tempnet_tau", "tuneclip",
    "tuneclip_objective", "tuneclip_phi", "tuneclip_u", "two_view_gaps",
]
