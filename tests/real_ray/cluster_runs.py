"""The run that tests on a cluster make."""

from commands.small_runs import strop

FLAGS = ("--num-steps", "4", "--lr", "1e-3")


def run(small, folder, *flags, code=0):
    done = strop("train", small.train, *FLAGS, "--run.folder", folder, *flags)
    assert done.code == code, done.err + done.out
    return done
