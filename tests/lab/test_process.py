import signal
import threading

import pytest

from symexplin.lab.process import Stopped, StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_remembered_and_the_handlers_come_back(number):
    found = signal.signal(number, signal.SIG_DFL)  # under nohup a hang-up is ignored
    try:
        with StopSignals() as stop:
            assert stop.signal is None
            signal.raise_signal(number)
            assert stop.signal == number
            error = stop.stopped("after step 3")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, found)
    assert isinstance(error, Stopped)
    assert (error.signal, str(error)) == (number, f"stopped by {signal.Signals(number).name} after step 3")


def test_only_a_second_ctrl_c_does_not_wait():
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_ignored_hang_up_stays_ignored_and_other_threads_set_no_handlers():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)
    thread = threading.Thread(target=StopSignals().__enter__)
    found = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is found
