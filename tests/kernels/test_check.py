"""Kernels are tried in a thread of their own, and a failure is a sentence."""

import threading

import torch

from symexplin.kernels.check import attempt


def test_it_runs_without_the_modes_of_this_thread():
    with torch.device("meta"), torch.inference_mode():
        made = attempt(lambda: torch.ones(2, dtype=torch.float32))
    assert made.device.type == "cpu"
    assert not made.is_inference()


def test_failures_are_sentences(monkeypatch):
    assert attempt(lambda: 1 / 0) == "ZeroDivisionError: division by zero"

    def no_thread(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert attempt(lambda: 1) == "can't start new thread"
