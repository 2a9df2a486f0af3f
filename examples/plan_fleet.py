"""Plan a fleet: how many replicas of a model keep their goals under a load, on which device.

Run: python examples/plan_fleet.py [MODEL [DEVICE [REQUESTS_A_SECOND]]]
     python examples/plan_fleet.py Llama-3.1-8B h100 200

The engine's own scheduler and accounting run the requests; only the time of a step is computed
from the device's data sheet. So no weight is loaded and no device is needed.
"""

import sys
from itertools import count

from quire.cli.plan import place_of
from quire.config import EngineConfig
from quire.planner.hardware import roofline
from quire.planner.simulation.result import Goals
from quire.planner.simulation.simulator import fleet_for, simulate
from quire.planner.subject import find_subject
from quire.traces.synthetic import Gamma, LogNormal, Synthetic
from quire.units import format_bytes

MODEL, DEVICE, RATE = (*sys.argv[1:], *(None, "l4", "1000")[len(sys.argv) - 1 :])
GOALS = Goals(ttft_s=0.2, tpot_s=0.05)  # the first token, and each further one

subject = find_subject(MODEL)  # None: the demo model
costs = roofline(subject, subject.spec, DEVICE, 1)
traffic = Synthetic(
    arrivals=Gamma(rate=float(RATE), cv=1.5),  # burstier than chance
    input_tokens=LogNormal(mean_tokens=300, sigma=0.8, max_tokens=1200),
    output_tokens=LogNormal(mean_tokens=60, sigma=0.8, max_tokens=400),
    num_requests=400,  # a plan for real traffic plays its busiest minutes
)
print(f"{subject.name} on {DEVICE}, {RATE} requests a second:")
for replicas in count(1):
    fleet = fleet_for(subject, EngineConfig(), place_of(None, DEVICE), costs, num_replicas=replicas)
    found = simulate(traffic, fleet, goals=GOALS)
    good, most = found.num_good / found.num_requests, format_bytes(found.peak_committed_bytes)
    print(f"{replicas:3} replicas: {good:6.1%} within the goals, {most} of KV memory each at most")
    if good >= 0.99:
        break
