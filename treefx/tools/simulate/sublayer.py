"""Simulate one sub-layer on all configurations: sequential, T3, T3-MCA, ideal."""

from dataclasses import dataclass

from treefx.tools.simulate.hardware.fused import arbitration_of, run_fused, run_gemm
from treefx.tools.simulate.hardware.gemm import plan_waves
from treefx.tools.simulate.hardware.machine import Machine
from treefx.tools.simulate.hardware.memory import Arbitration
from treefx.tools.simulate.hardware.ring import all_gather, reduce_scatter
from treefx.tools.simulate.hardware.traffic import Run
from treefx.tools.simulate.models import SubLayer

__all__ = ["Outcome", "simulate"]


@dataclass(frozen=True)
class Outcome:
    """Hold simulated runs of one sub-layer.

    The all-gather follows in every configuration; T3 does not overlap it.
    """

    sublayer: SubLayer
    gemm: Run
    rs: Run
    rs_near_memory: Run
    ag: Run
    t3: Run
    t3_mca: Run

    @property
    def output_bytes(self) -> float:
        """Bytes of the product's output, on each GPU."""
        return self.gemm.traffic.total("gemm stores")

    @property
    def sequential(self) -> float:
        """Seconds of GEMM, reduce-scatter and all-gather one after the other."""
        return self.gemm.seconds + self.rs.seconds + self.ag.seconds

    def speedup(self, configuration: str) -> float:
        """How many times faster than one after the other: ``t3``, ``t3-mca``, ``ideal`` (the shorter of GEMM and
        reduce-scatter hidden whole), ``ideal-nmc`` (so with near-memory reduction), ``ideal-all`` (so the whole
        all-reduce)."""
        gemm, ag = self.gemm.seconds, self.ag.seconds
        seconds = {
            "t3": self.t3.seconds + ag,
            "t3-mca": self.t3_mca.seconds + ag,
            "ideal": max(gemm, self.rs.seconds) + ag,
            "ideal-nmc": max(gemm, self.rs_near_memory.seconds) + ag,
            "ideal-all": max(gemm, self.rs.seconds + ag),
        }
        return self.sequential / seconds[configuration]

    @property
    def moved(self) -> tuple[float, float]:
        """Bytes moved in memory: one after the other, and with T3."""
        before = self.gemm.traffic + self.rs.traffic + self.ag.traffic
        return before.total(), (self.t3_mca.traffic + self.ag.traffic).total()


def simulate(sublayer: SubLayer, machine: Machine) -> Outcome:
    """Run a sub-layer on every configuration."""
    plain = plan_waves(sublayer.gemm, machine, stores_cached=True)
    past = plan_waves(sublayer.gemm, machine, stores_cached=False)
    size, ranks = plain.output, sublayer.ranks
    return Outcome(
        sublayer=sublayer,
        gemm=run_gemm(plain, machine),
        rs=reduce_scatter(size, ranks, machine),
        rs_near_memory=reduce_scatter(size, ranks, machine, near_memory=True),
        ag=all_gather(size, ranks, machine),
        t3=run_fused(past, ranks, machine, Arbitration()),
        t3_mca=run_fused(past, ranks, machine, arbitration_of(past, machine)),
    )
