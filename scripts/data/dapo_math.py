"""Make the data of `configs/experiment/dapo_math.yaml` from the published parquet or jsonl of DAPO-Math-17k, or AIME.

    python scripts/data/dapo_math.py dapo-math-17k.parquet data/dapo_math/train.parquet
    python scripts/data/dapo_math.py aime-2024.parquet data/dapo_math/test.parquet

The program reads ``prompt`` (a list of messages) and ``reward_model.ground_truth``, and writes ``messages`` and
``answer``. The published files contain each problem many times; the program keeps one copy of each.
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.row_files import read_rows


def main(source: str, target: str) -> None:
    """Write ``target`` from ``source``."""
    rows = read_rows(source, ["prompt", "reward_model"])
    problems = dict(zip(map(json.dumps, rows.column("prompt")), rows.column("reward_model.ground_truth"), strict=True))
    columns = {"messages": [json.loads(text) for text in problems], "answer": list(map(str, problems.values()))}
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), target)


if __name__ == "__main__":
    main(*sys.argv[1:])
