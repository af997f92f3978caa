from rollout_fleet.metrics import FleetMeter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_second_is_busy_while_anything_runs_and_waiting_only_when_nothing_does():
    clock = Clock()
    meter = FleetMeter(clock)
    meter.asking(True)
    clock.now += 2.0
    meter.running(2)
    clock.now += 3.0
    meter.running(1)
    clock.now += 1.0
    meter.running(0)
    clock.now += 0.5
    meter.asking(False)
    clock.now += 10.0
    counters = meter.counters()
    assert (counters.busy_s, counters.wait_s) == (4.0, 2.5)


def test_the_time_of_a_weight_load_is_not_busy():
    clock = Clock()
    meter = FleetMeter(clock)
    meter.running(1)
    clock.now += 3.0
    meter.loaded(0.5)
    clock.now += 1.0
    counters = meter.counters()
    assert (counters.busy_s, counters.load_s) == (3.5, (0.5,))


def test_a_weight_load_of_an_idle_engine_takes_nothing_off():
    clock = Clock()
    meter = FleetMeter(clock)
    meter.running(1)
    clock.now += 3.0
    meter.running(0)
    meter.loaded(0.5)
    assert meter.counters().busy_s == 3.0
