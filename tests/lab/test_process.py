import os
import signal
import subprocess
import sys
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
    assert error.signal == number
    assert str(error) == f"stopped by {signal.Signals(number).name} after step 3"


def test_a_second_ctrl_c_does_not_wait():
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_after_sigterm_waits_as_well():
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT


def test_other_threads_set_no_handlers():
    seen = []

    def work():
        with StopSignals() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


def test_an_ignored_hang_up_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


LAUNCHED = """if True:
    import signal, time
    from symexplin.lab.process import StopSignals, follow_launcher
    with StopSignals() as stop:
        follow_launcher()
        print("begun", flush=True)
        while stop.signal is None:
            time.sleep(0.05)
        print(signal.Signals(stop.signal).name, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills")
def test_who_follows_a_launcher_is_asked_to_stop_when_that_is_killed():
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code, LAUNCHED], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "begun\n"
        launcher.kill()
        assert launcher.stdout.read() == "SIGTERM\n"
