"""What stands between a layer's first and second projections: norms and rotations of latents."""

import torch
from torch import Tensor
from torch.nn import functional

from echokv.kernels.checks import FLOATS, check_rows, check_tensor
from echokv.kernels.reference.norms import rms_norm
from echokv.kernels.reference.rotary import check_angles, rotated


def mla_latents(
    q_a: Tensor,
    kv_a: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The query's latent and a row's two parts.

    Args:
        q_a: [T, q_rank] float, projected; rows at any distance.
        kv_a: [T, latent + rope], likewise.
        q_weight: [q_rank] float32, of the norm.
        kv_weight: [latent] float32, of the norm.
        eps: of both norms.
        cos: [T, rope / 2] float32.
        sin: likewise.

    Returns:
        q_latent [T, q_rank], normed; latent [T, latent], normed; k_rope [T, rope], rotated in
        pairs; in the dtype of q_a.
    """
    check_latent_args(q_a, kv_a, q_weight, kv_weight, cos, sin)
    latent, rope = kv_a.split((kv_weight.shape[0], 2 * cos.shape[1]), -1)
    return (
        rms_norm(q_a.contiguous(), q_weight, eps),
        rms_norm(latent.contiguous(), kv_weight, eps),
        rotated(rope, cos, sin, interleaved=True),
    )


def index_key_rows(
    keys: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """LayerNorm, then rotation of the first rope dimensions.

    Args:
        keys: [T, D] float, projected; rows at any distance.
        weight: [D] float32.
        bias: [D] float32.
        eps: added to the variance.
        cos: [T, rope / 2] float32, rope <= D.
        sin: likewise.
        interleaved: which pairing of dimensions rotates.

    Returns:
        like keys.
    """
    check_index_key_args(keys, weight, bias, cos, sin)
    normed = functional.layer_norm(keys.float(), weight.shape, weight, bias, eps).to(keys.dtype)
    rope = 2 * cos.shape[1]
    first = rotated(normed[:, :rope], cos, sin, interleaved=interleaved)
    return torch.cat((first, normed[:, rope:]), -1)


def check_latent_args(
    q_a: Tensor, kv_a: Tensor, q_weight: Tensor, kv_weight: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Raise ValueError unless `mla_latents` can take these."""
    tokens, device = q_a.shape[0], q_a.device
    check_rows("q_a", q_a, (None, q_weight.shape[0]), FLOATS)
    check_angles(cos, sin, tokens, device)
    width = kv_weight.shape[0] + 2 * cos.shape[1]
    check_rows("kv_a", kv_a, (tokens, width), q_a.dtype, device=device)
    for name, weight in (("q_weight", q_weight), ("kv_weight", kv_weight)):
        check_tensor(name, weight, (None,), torch.float32, device=device)


def check_index_key_args(
    keys: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Raise ValueError unless `index_key_rows` can take these."""
    check_rows("keys", keys, (None, weight.shape[0]), FLOATS)
    check_angles(cos, sin, keys.shape[0], keys.device)
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_tensor(name, parameter, (keys.shape[1],), torch.float32, device=keys.device)
    if 2 * cos.shape[1] > keys.shape[1]:
        raise ValueError(f"{2 * cos.shape[1]} rotated dimensions exceed keys of {keys.shape[1]}")
