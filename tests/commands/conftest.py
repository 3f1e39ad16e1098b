"""What the tests of commands share beside small_runs."""

import pytest
from commands.small_runs import strop


@pytest.fixture
def refused(tmp_path):
    """Runs a command that must be refused; returns its message. The folder runs/ of this test must stay absent."""

    def run(command, config, *flags):
        folder = tmp_path / "runs"
        done = strop(command, config, *flags, "--run.folder", folder)
        assert done.code == 2, done
        assert done.err.startswith("error: "), done.err
        assert "Traceback" not in done.err
        assert len(done.err.splitlines()) == 1, done.err
        assert not folder.exists(), [p.name for p in folder.iterdir()]
        return done.err

    return run
