"""Make the data of `configs/experiment/gsm8k.yaml` from the files of GSM8K (jsonl or parquet, as they are published).

    python scripts/data/gsm8k.py train.jsonl data/gsm8k/train.parquet
    python scripts/data/gsm8k.py test.jsonl data/gsm8k/test.parquet

The program reads ``question`` and ``answer``. Such an answer ends in ``#### 72``, for example. The program writes
``messages`` and ``answer``. The written answer is only the number.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.data.row_files import read_rows

INSTRUCTION = "Think step by step, and end with the answer as a number."


def main(source: str, target: str) -> None:
    """Write ``target`` from ``source``."""
    rows = read_rows(source, ["question", "answer"])
    messages, answers = [], []
    for index, (question, worked) in enumerate(zip(rows.column("question"), rows.column("answer"), strict=True)):
        _, mark, number = worked.rpartition("####")
        if not mark:
            raise ValueError(f"{rows.where(index)}: the answer must end in '#### NUMBER', got {worked[-60:]!r}")
        messages.append([{"role": "user", "content": f"{question.strip()}\n{INSTRUCTION}"}])
        answers.append(number.strip().replace(",", ""))
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"messages": messages, "answer": answers}), target)


if __name__ == "__main__":
    main(*sys.argv[1:])
