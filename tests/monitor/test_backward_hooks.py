"""Backward passes are heard in any form and in one's own thread, and `torch.jit.script` works meanwhile."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch
from torch import nn

from unsilent.monitor import Monitor, backward_hooks
from unsilent.monitor.backward_hooks import BackwardListener, add_listener, bind_to_this_thread, remove_listener

PLAIN = torch.autograd.backward, torch.jit.script, torch.amp.GradScaler.scale


class Listener(BackwardListener):
    """Notes what it hears."""

    def __init__(self):
        self.roots, self.errors = [], []

    def before_backward(self, tensors, scale):
        self.roots.append(len(tensors))

    def after_backward(self):
        pass

    def after_scaler_update(self):
        raise ZeroDivisionError("planted")

    def hook_failed(self, error):
        self.errors.append(type(error))


@pytest.fixture
def listener():
    one = Listener()
    add_listener(one)
    yield one
    remove_listener(one)
    assert (torch.autograd.backward, torch.jit.script, torch.amp.GradScaler.scale) == PLAIN


def leaf():
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("form", [tuple, list, iter, lambda losses: (one for one in losses)])
def test_losses_in_any_form_are_differentiated(listener, form):
    x = leaf()
    torch.autograd.backward(form([x.sum(), (3 * x).sum()]))
    assert (x.grad.tolist(), listener.roots) == ([4.0, 4.0], [2])


def test_an_edge_of_a_graph_is_differentiated(listener):
    x = leaf()
    edge = torch.autograd.graph.get_gradient_edge(2 * x)
    torch.autograd.backward(edge, torch.ones(2))
    assert (x.grad.tolist(), listener.roots) == ([2.0, 2.0], [0])


def test_a_listener_of_one_thread_hears_that_one_alone():
    own, bound, every = Listener(), Listener(), Listener()
    add_listener(own, threading.get_ident())
    add_listener(bound)
    add_listener(every)
    ready = threading.Barrier(2, timeout=30)

    def other():
        bind_to_this_thread(bound)
        leaf().sum().backward()
        ready.wait()

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # the other thread makes a whole pass inside of this one
            thread.start()
            ready.wait()
            return gradient

    thread = threading.Thread(target=other)
    try:
        Meanwhile.apply(leaf()).sum().backward()
        thread.join()
        assert [len(one.roots) for one in (own, bound, every)] == [1, 2, 2]
        leaf().sum().backward()
        assert [len(one.roots) for one in (own, bound, every)] == [2, 2, 3]
    finally:
        for one in (own, bound, every):
            remove_listener(one)


def test_a_listener_is_not_kept_alive():
    add_listener(Listener())
    gc.collect()
    assert backward_hooks._listeners == []
    assert torch.autograd.backward is PLAIN[0]


@pytest.mark.parametrize("place", ["_scale_of", "tensors_in"])
def test_errors_around_a_pass_are_those_of_the_listeners(listener, monkeypatch, place):
    def explode(*args):
        raise KeyError("planted")

    monkeypatch.setattr(backward_hooks, place, explode)
    scaler, x = torch.amp.GradScaler("cpu", init_scale=4.0), leaf()
    optimizer = torch.optim.SGD([x], 1.0)
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (x.tolist(), listener.errors) == ([0.0, 0.0], [KeyError, ZeroDivisionError])


# -- torch.jit.script ----------------------------------------------------------------------------------------------


def scripted(what):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(what)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_a_model_is_compiled_while_and_after_it_is_monitored():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    x = torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with Monitor(model, optimizer, watch=("0:output",), sampling="fixed:1", strict=True) as monitor:
        step()
        before = [dict(module._forward_hooks) for module in model.modules()]
        assert torch.equal(scripted(model)(x), model(x))
        assert [dict(module._forward_hooks) for module in model.modules()] == before
        step()
        assert monitor._judge.unseen() == []
    assert torch.equal(scripted(model)(x), model(x))


def test_functions_and_classes_are_compiled_with_names_of_their_caller(listener):
    factor = doubled

    def function(x: torch.Tensor) -> torch.Tensor:
        return factor(x) + 1

    assert scripted(function)(torch.ones(1)).tolist() == [3.0]
