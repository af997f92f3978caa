"""The log of consumed trajectories."""

import pyarrow.parquet as pq
import pytest

from learner.trajectory_log import SCHEMA, TrajectoryLog
from learner.types import RankBatch


def test_an_incomplete_log_file_is_not_visible(tmp_path, monkeypatch):
    log, batch = TrajectoryLog(str(tmp_path)), RankBatch(version=7, shares=(), max_lag=1)
    whole = log.write(batch, {}, [], rank=0)
    assert pq.read_schema(whole) == SCHEMA

    def torn(table, path):
        path.write_bytes(b"PAR1")
        raise OSError("killed")

    monkeypatch.setattr(pq, "write_table", torn)
    for rank in (0, 1):
        with pytest.raises(OSError, match="killed"):
            log.write(batch, {}, [], rank=rank)
    assert list(tmp_path.glob("*.parquet")) == [whole]
    assert pq.read_schema(whole) == SCHEMA
