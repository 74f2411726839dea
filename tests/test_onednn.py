"""Products and packed linear layers give what plain ones give, follow their weights, and leave training alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from dspark_exp.onednn import PackedLinear, pack_linears, product

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "width", "vocab"), [(5, 320, 512), (3, 512, 320), (4, 8, 16), (0, 320, 512)])
def test_product_of_rows_and_weights(rows: int, width: int, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, weight = torch.randn(rows, width).to(dtype), torch.randn(vocab, width).to(dtype)
    view = weight.T.contiguous().T  # the same values, laid out column by column
    expected = (left.double() @ weight.double().T).to(dtype)
    for given in (weight, view):
        torch.testing.assert_close(
            product(left, given), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
        )


def _linear(bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(320, 512, bias=bias).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 320), (7, 320), (200, 320), (2, 5, 320), (320,), (0, 320)])
def test_equals_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    layer = _linear(bias)
    tokens = torch.randn(shape)
    expected = nn.functional.linear(tokens.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert pack_linears(layer) == layer.weight.nbytes
    with torch.no_grad():
        torch.testing.assert_close(layer(tokens).double(), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_as_exact_as_the_plain_layer() -> None:
    layer = _linear(dtype=torch.bfloat16)
    tokens = torch.randn(9, 320, dtype=torch.bfloat16)
    with torch.no_grad():
        plain = layer(tokens)
        pack_linears(layer)
        torch.testing.assert_close(layer(tokens), plain, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_follows_weights_that_change() -> None:
    layer = _linear()
    pack_linears(layer)
    tokens = torch.randn(3, 320)
    layer(tokens)
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(tokens), tokens @ layer.weight.T, rtol=1e-4, atol=1e-4)
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    torch.testing.assert_close(layer(tokens), tokens @ layer.weight.T, rtol=1e-4, atol=1e-4)
    layer.to(torch.float64)
    torch.testing.assert_close(layer(tokens.double()), tokens.double() @ layer.weight.T)


def test_gradients_and_autocast_take_the_usual_way() -> None:
    layer = _linear()
    tokens = torch.randn(3, 320)
    expected = layer(tokens)
    pack_linears(layer)
    out = layer(tokens)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(tokens).dtype == torch.bfloat16


@torch.no_grad()
def test_copies_have_weights_of_their_own() -> None:
    layer = _linear()
    pack_linears(layer)
    tokens = torch.randn(3, 320)
    expected = layer(tokens)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(other, PackedLinear)
        other.weight.zero_()
        assert not other(tokens).any()
        torch.testing.assert_close(layer(tokens), expected)


def test_what_is_packed() -> None:
    model = nn.ModuleDict({"wide": _linear(), "narrow": nn.Linear(8, 8), "embedding": nn.Embedding(1000, 320)})
    assert pack_linears(model, max_bytes=model["wide"].weight.nbytes - 1) == 0
    assert type(model["wide"]) is nn.Linear
    names = list(model.state_dict())
    assert pack_linears(model, model["wide"]) == model["wide"].weight.nbytes
    assert isinstance(model["wide"], PackedLinear)
    assert type(model["narrow"]) is nn.Linear
    assert list(model.state_dict()) == names
    assert pack_linears(model) == model["wide"].weight.nbytes  # again: nothing changes
    assert pack_linears(nn.Linear(512, 512, device="meta")) == 0
