"""Write the two files of this example: one-step sums as chat prompts, for training and held out."""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    rng = random.Random(0)
    sums = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    rng.shuffle(sums)
    for name, part in (("train.jsonl", sums[:320]), ("held_out.jsonl", sums[320:368])):
        rows = ({"prompt": f"What is {a} + {b}? Answer with the number only.", "label": str(a + b)} for a, b in part)
        (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
