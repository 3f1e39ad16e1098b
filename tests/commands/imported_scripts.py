"""Runs strop import-slime on scripts that a test writes, and takes apart what it printed."""

import re
import tomllib

from commands.small_runs import strop

from strop.config import load_config

# What a launch cannot do without, in one line.
LEAST = {
    "--hf-checkpoint": "/m",
    "--prompt-data": "/d.jsonl",
    "--rm-type": "math",
    "--num-rollout": "10",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "4",
}


class Written:
    """What the command printed, group by group, and the config that it wrote."""

    def __init__(self, done, path):
        assert done.code == 0, done.err
        self.out, self.path = done.out, path
        self.values = tomllib.loads(path.read_text())
        self.groups, title = {}, ""
        for line in done.out.splitlines():
            if line.startswith(" "):
                self.groups[title].append(line.strip())
            elif re.search(r": \d+$", line):
                title = line.rpartition(":")[0]
                self.groups.setdefault(title, [])

    def config(self):
        return load_config(self.path)

    def explained(self, flag):
        """Whether a flag stands in one of the groups, and not only in the words about another."""
        lines = (line for line in self.out.splitlines() if line.startswith("  -"))
        return any(flag in re.split(r"  (?:->|\()", line)[0].replace(",", " ").split() for line in lines)

    def reason(self, flag):
        """The line below a flag without counterpart."""
        lines = self.groups["no counterpart"]
        (place,) = [i for i, line in enumerate(lines) if flag in line.replace(",", "").split()]
        return lines[place + 1]


def import_text(folder, text):
    """Imports a script, given as text."""
    script, config = folder / "run.sh", folder / "run.toml"
    script.write_text(text)
    return Written(strop("import-slime", script, "-o", config, "--force"), config)


def import_launch(folder, **flags):
    """Imports a launch of a few flags on top of what every launch has; None takes a flag away."""
    flags = LEAST | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    words = (f"{name} {value}" for name, value in flags.items() if value is not None)
    return import_text(folder, f"python3 train.py {' '.join(words)}\n")
