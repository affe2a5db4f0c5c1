"""Several matrices over one input, kept as one and multiplied at once.

A decoding step's small products are launches rather than work: joined, they read the same bytes in
one, and in fp8 the input is quantised once.
"""

from torch import Tensor
from torch.nn import functional

from echokv.kernels.reference.fp8_linear import FP8_BLOCK
from echokv.models.fp8 import fp8_weight
from echokv.models.layers import Stacked, weight
from echokv.models.matrices import Matrices


class Joined(Stacked):
    """x [T, in_features] -> one result [T, rows] a part.

    In fp8 when every part is stored so; each part then begins with a block of its own. The module
    that holds it publishes `parts` among its own `places`, since their names are not below this
    module's.

    Args:
        parts: rows of each matrix, by its name below `matrices`' prefix.
        in_features: columns of all of them.
        matrices: how they are kept.
    """

    def __init__(self, parts: dict[str, int], in_features: int, matrices: Matrices) -> None:
        super().__init__()
        self._is_fp8 = matrices.stay_fp8(*parts, sizes=(in_features,))
        self._kernels = matrices.kernels
        self._spans: dict[str, slice] = {}
        end = 0
        for name, rows in parts.items():
            start = -(-end // FP8_BLOCK) * FP8_BLOCK if self._is_fp8 else end
            end = start + rows
            self._spans[name] = slice(start, end)
        if self._is_fp8:
            self.weight, self.weight_scale_inv = fp8_weight(end, in_features)
        else:
            self.weight = weight(end, in_features, dtype=matrices.dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Each part's product, in their order; on a GPU views of one result.

        On a CPU parts are multiplied one by one, as an input's bits may depend on the shape.
        """
        spans = self._spans.values()
        if self._is_fp8:
            assert self._kernels is not None, "built to be counted"
            whole = self._kernels.fp8_linear(x, self.weight, self.weight_scale_inv)
        elif x.is_cuda:
            whole = functional.linear(x, self.weight)
        else:
            return [functional.linear(x, self.weight[span]) for span in spans]
        return [whole[:, span] for span in spans]

    def places(self) -> dict[str, Tensor]:
        """See `Stacked`; none, as `parts` says."""
        return {}

    def parts(self) -> dict[str, Tensor]:
        """Names of checkpoint tensors, relative to the holder's, and the views to fill."""
        places = {f"{name}.weight": self.weight[span] for name, span in self._spans.items()}
        if self._is_fp8:
            for name, span in self._spans.items():
                blocks = slice(span.start // FP8_BLOCK, -(-span.stop // FP8_BLOCK))
                places[f"{name}.weight_scale_inv"] = self.weight_scale_inv[blocks]
        return places
