"""Switches: sources of variation between two runs of one training, written ``name`` or ``name=value``.

Algorithmic switches give a stream of random draws a fresh seed in each replica. Implementation switches leave these draws
unchanged and change how the same sums are computed: their order, the kernel, or the instruction set. The four variants of
"Randomness in neural network training" (MLSys 2022, arXiv 2106.11872) are named sets of switches.

Some switches are environment variables that are read when torch is loaded, so replicas with them run in separate processes.
Everything whose switch is not set stays fixed: one thread, deterministic algorithms, rows of a batch in their given order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.sizes import parse_whole_number

ALGORITHMIC, IMPLEMENTATION = "algorithmic", "implementation"
MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Switch:
    """A source of variation between runs that can be switched on or off.

    Attributes:
        varied_aspect: Aspect of the run that varies, in words.
        is_random_stream: Whether each replica gets a fresh seed for the random stream of this name.
        values: Values that the switch accepts, the default first; empty if it has no named values.
        takes_thread_count: Whether its value is a number of threads, 2 or more.
        environment_variable: Name of the environment variable that the switch sets; empty if it sets none.
        needs_cuda: Whether the switch needs a CUDA device.
    """

    name: str
    kind: str
    varied_aspect: str
    is_random_stream: bool = False
    values: tuple[str, ...] = ()
    takes_thread_count: bool = False
    environment_variable: str = ""
    needs_cuda: bool = False


SWITCHES: Mapping[str, Switch] = {
    switch.name: switch
    for switch in (
        Switch("init", ALGORITHMIC, "the initial weights", is_random_stream=True),
        Switch("order", ALGORITHMIC, "the order of the training data", is_random_stream=True),
        Switch("augment", ALGORITHMIC, "augmentation", is_random_stream=True),
        Switch("dropout", ALGORITHMIC, "all other random draws of forward passes", is_random_stream=True),
        Switch("within", IMPLEMENTATION, "the order of rows and sums within each batch", is_random_stream=True),
        Switch("threads", IMPLEMENTATION, "the number of threads", takes_thread_count=True),
        Switch(
            "race", IMPLEMENTATION, "the number of threads, with nondeterministic operations allowed", takes_thread_count=True
        ),
        Switch("onednn", IMPLEMENTATION, "oneDNN's kernels", values=("off",)),
        Switch(
            "isa", IMPLEMENTATION, "the instruction set of torch's kernels",
            values=("default", "avx2", "avx512"), environment_variable="ATEN_CPU_CAPABILITY",
        ),
        Switch(
            "onednn-isa", IMPLEMENTATION, "the instruction set of oneDNN's kernels",
            values=("AVX2", "SSE41", "AVX", "AVX512_CORE"), environment_variable="ONEDNN_MAX_CPU_ISA",
        ),
        Switch(
            "mkl", IMPLEMENTATION, "the code path of MKL's matrix products",
            values=("COMPATIBLE", "AVX", "AVX2", "AVX512"), environment_variable="MKL_CBWR",
        ),
        Switch("layout", IMPLEMENTATION, "the memory layout of images and kernels", values=("channels_last",)),
        Switch("cudnn-benchmark", IMPLEMENTATION, "cuDNN measures several kernels and takes the fastest", needs_cuda=True),
        Switch("tf32", IMPLEMENTATION, "matrix products and convolutions in TF32", needs_cuda=True),
        Switch("nondeterministic", IMPLEMENTATION, "kernels with atomic additions are allowed", needs_cuda=True),
    )
}  # fmt: skip
"""All switches, in the order in which they are written."""
_ORDER = tuple(SWITCHES)


@dataclass(frozen=True, slots=True)
class Switches:
    """A set of switches, as (name, value) pairs in the order of `SWITCHES`.

    The value is empty for a switch without values. ``str`` is the inverse of `parse`.
    """

    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Switches:
        """The switches in a text such as ``within+threads=2``, a variant's name or ``control``.

        ``control`` means no switches. Raises ``UsageError``.
        """
        named = VARIANTS.get(text.lower())
        if named is not None:
            return named
        by_name: dict[str, str] = {}
        for part in text.split("+"):
            name, equals, value = part.strip().partition("=")
            if name in by_name:
                raise UsageError(f"switch {name!r} is set twice in {text!r}; give it once")
            by_name[name] = _value(name, value if equals else None)
        if {"threads", "race"} <= set(by_name):
            raise UsageError(f"{text!r} sets threads and race, which both set the number of threads; leave out threads")
        return cls(tuple(sorted(by_name.items(), key=lambda item: _ORDER.index(item[0]))))

    def __str__(self) -> str:
        return "+".join(f"{name}={value}" if value else name for name, value in self.settings) or CONTROL

    def __contains__(self, name: str) -> bool:
        return any(name == set_name for set_name, _ in self.settings)

    def value(self, name: str) -> str:
        """The value of a switch; empty if the switch is not set or has no value."""
        return dict(self.settings).get(name, "")

    def single_switches(self) -> Iterable[Switches]:
        """One set of switches for each of these switches."""
        return (Switches((setting,)) for setting in self.settings)

    @property
    def varies_between_replicas(self) -> bool:
        """Whether replicas with these switches may differ from each other."""
        return any(SWITCHES[name].is_random_stream or name in RACING for name, _ in self.settings)

    @property
    def threads(self) -> int:
        """The number of CPU threads of a run with these switches."""
        return int(self.value("threads") or self.value("race") or 1)

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """Environment variables that must be set before torch is loaded, as (name, value) pairs."""
        return tuple(
            (SWITCHES[n].environment_variable, value) for n, value in self.settings if SWITCHES[n].environment_variable
        )


CONTROL = "control"
RACING = ("race", "cudnn-benchmark", "nondeterministic")
"""Switches with which two runs with equal seeds may differ."""
_ALGO = tuple((name, "") for name in ("init", "order", "augment", "dropout"))
VARIANTS: Mapping[str, Switches] = {
    CONTROL: Switches(),
    "algo": Switches(_ALGO),
    "impl": Switches((("within", ""),)),
    "algo+impl": Switches((*_ALGO, ("within", ""))),
}


def _value(name: str, value: str | None) -> str:
    """The value of a switch after parsing; raises ``UsageError`` for an unknown switch or value."""
    if name not in SWITCHES:
        raise unknown_name_error("switch", name, (*SWITCHES, *VARIANTS))
    switch = SWITCHES[name]
    if switch.takes_thread_count:
        text = "2" if value is None else value
        count = parse_whole_number(text)
        if count is None or not 2 <= count <= MOST_THREADS:
            raise UsageError(
                f"switch {name} is {text!r}; expected a number of threads from 2 to {MOST_THREADS}, like {name}=2"
            )
        return str(count)
    if not switch.values:
        if value is not None:
            raise UsageError(f"switch {name} takes no value, found {value!r}; write {name}")
        return ""
    if value is not None and value not in switch.values:
        raise unknown_name_error(f"value of switch {name}", value, switch.values)
    return switch.values[0] if value is None else value
