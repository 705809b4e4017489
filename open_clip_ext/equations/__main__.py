"""Print every method's value on eight pairs."""

import torch
from torch import nn
from torch.nn.functional import normalize

from open_clip_ext import equations as eq


def main() -> None:
    """Print every method's value on eight pairs in 16 dimensions, at the first visit of their rows.

    NeuCLIP's is that after 20 steps of its Algorithm 1 with two linear encoders.
    """
    torch.manual_seed(0)
    e1 = normalize(torch.randn(8, 16, dtype=torch.float64), dim=1)
    e2 = normalize(e1 + 0.2 * torch.randn(8, 16, dtype=torch.float64), dim=1)
    tau, rho, eps = torch.tensor(0.07, dtype=torch.float64), 6.5, 1e-14
    taus, new_rows = tau.expand(2, 8), torch.zeros(2, 8, dtype=torch.float64)
    h = eq.gaps(e1, e2)
    g, phi = eq.batch_g(h, tau), eq.tuneclip_phi(h, tau, m=0.1)
    u = eq.sogclr_u(new_rows, g, gamma=eq.fastclip_gamma(epoch=0, gamma_min=0.2, decay_epochs=15), eps=eps)

    image_encoder, text_encoder = (nn.Linear(16, 16, bias=False).double() for _ in range(2))
    learned_tau = tau.clone().requires_grad_()
    optimizer = torch.optim.AdamW([*image_encoder.parameters(), *text_encoder.parameters(), learned_tau], lr=1e-3)
    w1, w2 = (torch.empty(4, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    neuclip_values = eq.neuclip_algorithm_1(
        image_encoder, text_encoder, e1, e2, learned_tau, optimizer, w1, w2, torch.optim.Adagrad([w1, w2], lr=0.1),
        batch_size=8, T=20, T_r=500, T_u=10, rho=rho, eps=eps,
    )

    online, target = (
        nn.ModuleList(nn.Sequential(nn.Linear(16, 1), nn.Flatten(0)).double() for _ in range(2)) for _ in range(2)
    )
    z = eq.amorlip_z(e1, e2, 1 / tau)
    adam = torch.optim.Adam(online.parameters(), lr=1e-3)
    eq.amorlip_lambda(online, target, adam, e1, e2, z, z, k=0, T_online=8, T_target=2, T_lambda=3, alpha=0.999)

    w = torch.randn(4, 16, dtype=torch.float64)
    c, b, log_phi = torch.ones(4).double(), torch.zeros(()).double(), torch.tensor(0.01).double().log()
    net_taus = torch.stack(
        [eq.tempnet_tau(e, torch.eye(16).double(), e.new_zeros(16), w, log_phi, c, b, 0.005, 0.05) for e in (e1, e2)]
    )
    net_g = eq.batch_g(h, net_taus)

    drrho_g = eq.batch_g(eq.drrho_gaps(e1, e2, e1.roll(1, 1), e2), tau)

    values = {
        "clip": eq.clip(e1, e2, tau),
        "siglip": eq.siglip(e1, e2, tau, -1 / tau),
        "cyclip": eq.cyclip(e1, e2, tau),
        "dcl": eq.dcl(e1, e2, tau),
        "sogclr": eq.sogclr(g, tau, u),
        "isogclr": eq.isogclr(g, taus, eq.isogclr_s(new_rows, g, beta0=1.0), rho),
        "fastclip-v0": eq.fastclip_v0(g, u),
        "fastclip-v1": eq.fastclip_v1(g, tau, u),
        "fastclip-v2": eq.fastclip_v2(g, taus, u, rho),
        "fastclip-v3": eq.fastclip_v3(g, tau, u, rho),
        "neuclip": torch.tensor(neuclip_values[-1]),
        "amorlip": eq.amorlip(e1, e2, 1 / tau, eq.amorlip_networks(target, e1, e2), rho),
        "tuneclip": eq.tuneclip(phi, tau, eq.tuneclip_u(new_rows, phi, gamma=1.0), eps),
        "queue": eq.queue(g, tau, eq.queue_alpha(e2.roll(1, 0), e1.roll(1, 0), g, e1, e2, tau, 0.6, eps), rho, eps),
        "scent": eq.scent(g, tau, eq.scent_u(u, g, 10.0, eps), rho),
        "tempnet": eq.tempnet(net_g, net_taus, eq.isogclr_s(new_rows, net_g, beta0=1.0), rho),
        "drrho-clip": eq.drrho_clip(drrho_g, tau, eq.sogclr_u(new_rows, drrho_g, gamma=1.0, eps=eps)),
    }
    for name, value in values.items():
        print(f"{name:12} {value.item():8.4f}")


if __name__ == "__main__":
    main()
