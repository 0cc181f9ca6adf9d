"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..converters.mil import Graph, Operation
from ..errors import DeviceError
from .compute import Argument, Compute
from .constants import Constants


def conv(op: Operation, graph: Graph, constants: Constants) -> Compute:
    """A dense 1x1 convolution: `W (Cout, Cin) @ x (Cin, H*W)`, accumulated in float32."""
    weight = constants.get(op.inputs["weight"][0])
    bias = constants.get(op.inputs["bias"][0]) if "bias" in op.inputs else None
    shape = op.outputs[0].type.shape
    ones = ("strides", "dilations")
    plain = (
        weight is not None
        and weight.ndim == 4
        and weight.shape[2:] == (1, 1)
        and int(graph.constant(op, "groups", 1)) == 1
        and all(np.all(np.asarray(graph.constant(op, name, 1)) == 1) for name in ones)
        and not np.any(np.asarray(graph.constant(op, "pad", 0)))
        and not ("bias" in op.inputs and bias is None)
        and shape[0] == 1
    )
    if not plain or weight is None:
        raise DeviceError(
            f"conv {op.name} of {graph.source} is not a dense 1x1 convolution with constant weights, which is all the "
            "interpreter knows"
        )
    columns = int((shape[2] or 0) * (shape[3] or 0))
    return conv1x1(op.inputs["x"][0], weight[:, :, 0, 0], columns, bias)


def conv1x1(x: Argument, weight: np.ndarray, columns: int, bias: np.ndarray | None = None) -> Compute:
    """`weight (Cout, Cin) @ x (Cin, columns) + bias (Cout)`."""
    outputs, channels = weight.shape

    def run(operands: Sequence[np.ndarray], out: np.ndarray) -> None:
        y = out.reshape(outputs, columns)
        np.matmul(weight, operands[0].reshape(channels, columns), out=y)
        if bias is not None:
            np.add(y, bias[:, None], out=y)

    flops = 2 * outputs * channels * columns
    return Compute((str(x),), run, weight, bias, accumulates=True, flops=flops)
