"""Recording of an evaluation as a tape of operations, without their values.

A dispatch mode sees every operation below autograd. Reads without an operation are intercepted on `torch.Tensor`
(``tolist``, ``numpy``, ``data_ptr`` …): Python then knows bits of a tensor, so a trial in which these bits differ must
not be evaluated from the tape.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.nested import map_tensors
from unsilent.engine.tape import (
    READBACK,
    ArgumentSlot,
    FaultEntryPoint,
    Node,
    StorageWindow,
    Tape,
    Unrecordable,
    Value,
    Write,
    default_generator_of,
    flatten,
    private_copy,
    window_of,
)
from unsilent.sites.caches import KvCacheObserver, kv_cache_entries
from unsilent.sites.calls import OperationNamer
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.operands import operation_name, written_by

UNSEEN = (
    "tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__",
    "__deepcopy__", "__reduce_ex__", "__repr__", "__format__", "share_memory_", "__cuda_array_interface__",
)  # fmt: skip
"""Ways to read a tensor without an operation."""
HANDS_OUT = frozenset({
    "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "share_memory_",
    "__cuda_array_interface__",
})  # fmt: skip
"""Ways of `UNSEEN` that return the memory itself, which can then be read and written at any time."""
SCALAR_READS = ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__")
"""Ways to read a number by an operation, which is seen unless it runs in another thread."""
MAKERS = ("tensor", "as_tensor", "asarray")
"""Functions that make a tensor from numbers of Python or numpy, which may have any origin."""
LARGEST_CONSTANT = 1 << 20
"""Size in bytes up to which tensors that are neither parameter nor input are copied, so that a run may write to them."""


class Recorder(DispatchMode):
    """The dispatch mode that records one evaluation; see `record`."""

    def __init__(
        self, calls: OperationNamer, known_tensors: Iterable[Tensor], attributes: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(calls)
        self.tape = Tape()
        self._calls = calls
        self._current: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._numbers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._memory_before = {t.untyped_storage()._cdata for t in known_tensors}
        self._explained = self._memory_before | {t.untyped_storage()._cdata for t in attributes}
        self._handed_out: dict[int, str] = {}
        self._thread = threading.get_ident()
        self._broken: Unrecordable | None = None
        self._busy = False
        self.numbers = False
        """Whether a tensor is currently being made from numbers of Python."""

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._busy:  # a read by this recorder
            return func(*args, **kwargs)
        name = self._calls.next_name(func)
        if self._broken is not None:
            return func(*args, **kwargs)
        self._busy = True
        try:
            return self._operation(name, func, args, kwargs)
        finally:
            self._busy = False

    def _operation(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and add it to the tape.

        If it cannot be recorded, the reason is stored and the run continues.
        """
        try:
            node, written = self._begin(name, func, args, kwargs)
        except Exception as why:
            self._give_up(name, why)
            return func(*args, **kwargs)
        sizes = [t.untyped_storage().nbytes() for t in written]
        before = self._random_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        result = func(*args, **kwargs)
        if before is not None and not ("attention" in name and torch.equal(before, self._random_state())):
            node.generator = before, self._random_state()  # maybe equal, but it may draw under a fault
        try:
            if sizes != [t.untyped_storage().nbytes() for t in written]:
                raise Unrecordable(f"{name} changes the size of existing memory")
            self._results(node, result, written, {t.untyped_storage()._cdata for _, t in _tensors(args, kwargs)})
        except Exception as why:
            self._give_up(name, why)
        return result

    def _give_up(self, name: str, why: Exception) -> None:
        """Store the reason why this run cannot be recorded.

        The run itself continues.
        """
        self._broken = why if isinstance(why, Unrecordable) else Unrecordable(f"{name} ({type(why).__name__}: {why})")

    def _begin(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Node, list[Tensor]]:
        result = list(_tensors(args, kwargs))
        if operation_name(func) == "lift_fresh" and self.numbers:  # reads by Python are recorded
            self._numbers |= {s._cdata: weakref.ref(s) for s in (t.untyped_storage() for _, t in result)}
        reads = tuple(self._window(t) for _, t in result)
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise Unrecordable(f"{name} draws from its own random generator")
        positional, named = map_tensors((args, kwargs), lambda path, tensor: None)  # a tape holds no values
        node = Node(len(self.tape.nodes), name, func, positional, named, tuple(slot for slot, _ in result), reads)
        first: dict[int, int] = {}
        node.shared_arguments = tuple(
            (k, i) for k, (_, t) in enumerate(result) if (i := first.setdefault(id(t), k)) != k
        )
        written = written_by(func, args, kwargs)
        places = [self._window(t) for t in written]
        node.written = frozenset(k for k, window in enumerate(reads) if window in places)
        return node, written

    def _results(self, node: Node, result: Any, written: list[Tensor], seen: set[int]) -> None:
        """Assign values to the results of an operation, and add the operation to the tape unless it only made views."""
        writes: dict[int, Write] = {}
        for tensor in written:
            key = tensor.untyped_storage()._cdata
            if key not in writes:
                writes[key] = self._write(node, tensor, key)
        new_values = {w.new for w in writes.values()}
        windows: list[Any] = []
        for part in flatten(result):
            if not isinstance(part, Tensor):
                windows.append(part)
                continue
            key = part.untyped_storage()._cdata
            if key not in seen:
                if self._known(key) not in (None, *new_values):
                    raise Unrecordable(f"{node.name} returns memory that is not among its arguments")
                if self._known(key) is None:
                    new_values.add(self._new(part, node.index))
            windows.append(window_of(_without_wrapper(part), self._value(part)))
        visible = any(not isinstance(w, StorageWindow) and w is not None for w in windows)
        checks = not any(isinstance(w, StorageWindow) for w in windows)  # without a result, its purpose is to raise
        if not new_values and not visible and not checks:
            return
        node.writes, node.results, node.new_values = tuple(writes.values()), tuple(windows), tuple(sorted(new_values))
        self._append(node)

    def _write(self, node: Node, tensor: Tensor, key: int) -> Write:
        old = self._value(tensor)
        if key in self._memory_before or (old in self.tape.externals and self._value_of(old).nbytes > LARGEST_CONSTANT):
            raise Unrecordable(f"{node.name} writes into memory that existed before the run")
        home = self._value_of(old).storage_window
        new = self._add(node.index, tensor.untyped_storage().nbytes(), home)
        self._current[key] = (weakref.ref(tensor.untyped_storage()), new)
        return Write(old, new)

    def record_readback(self, tensor: Tensor, how: str) -> None:
        """Record that Python reads a tensor without an operation."""
        if self._broken is not None or self._busy:
            return
        self._busy = True
        if self.is_other_thread:
            self._broken = Unrecordable(f"another thread reads a tensor ({how})")
        try:
            node = Node(len(self.tape.nodes), f"{self._calls.module}#{how}", None, (), {}, (), (self._window(tensor),))
            node.results = (READBACK,)
            self._append(node)
            if how in HANDS_OUT and self._value(tensor) not in self.tape.externals:
                self._handed_out[self._value(tensor)] = how
        except Exception as why:
            self._give_up(how, why)
        finally:
            self._busy = False

    @property
    def is_other_thread(self) -> bool:
        """Whether the current thread is not the recorded one."""
        return threading.get_ident() != self._thread

    def record_kv_cache_entry(self, number: int, cache: Any) -> None:
        """Record that a call is given a key/value cache, as a place at which faults can be injected."""
        if self._broken is not None:
            return
        self._busy = True
        try:
            for name, tensor in kv_cache_entries(cache).items():
                self.tape.caches[name, number] = FaultEntryPoint(len(self.tape.nodes), self._window(tensor))
        except Exception as why:
            self._give_up("the key/value cache", why)
        finally:
            self._busy = False

    def finish(self, output: Any) -> Tape:
        """The tape, after the run has returned ``output``.

        Raises `Unrecordable` if the run could not be recorded.
        """
        if self._broken is not None:
            raise self._broken
        copies: dict[int, Any] = {}
        result = copyable_tensors(output)
        windows = [self._window(t) for t in result]
        self.tape.output = copy.deepcopy(output, copies)
        for tensor, window in zip(result, windows, strict=True):
            self.tape.output_tensors.append((copies[id(tensor)], window))
            self._value_of(window.value).output = True
        return self.tape

    # -- values ------------------------------------------------------------------------------------------------

    def _window(self, tensor: Tensor) -> StorageWindow:
        return window_of(_without_wrapper(tensor), self._value(tensor))

    def _value(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self._known(storage._cdata)
        return self._external(tensor) if known is None else known

    def _known(self, key: int) -> int | None:
        entry = self._current.get(key)  # the address may have been used again since
        return None if entry is None or entry[0]() is None else entry[1]

    def _external(self, tensor: Tensor) -> int:
        tensor = tensor.detach() if tensor.requires_grad else tensor
        key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        index = self._new(tensor, None)
        if key not in self._memory_before and size <= LARGEST_CONSTANT:
            tensor = private_copy(tensor)
        elif size:
            self.tape.by_storage[tensor.untyped_storage().data_ptr()] = index
        self.tape.externals[index] = tensor
        if key not in self._explained and (key not in self._numbers or self._numbers[key]() is None):
            self.tape.unexplained.append(index)
        return index

    def _new(self, tensor: Tensor, producer: int | None) -> int:
        storage = tensor.untyped_storage()
        index = self._add(producer, storage.nbytes(), window_of(_without_wrapper(tensor), len(self.tape.values)))
        self._current[storage._cdata] = (weakref.ref(storage), index)
        return index

    def _add(self, producer: int | None, nbytes: int, home: StorageWindow) -> int:
        index = len(self.tape.values)
        self.tape.values.append(Value(index, producer, nbytes, home._replace(value=index)))
        return index

    def _value_of(self, index: int) -> Value:
        return self.tape.values[index]

    def _append(self, node: Node) -> None:
        for value in node.values:
            if node.func is not None and value in self._handed_out:
                raise Unrecordable(
                    f"{node.name} uses memory that Python code can access directly ({self._handed_out[value]})"
                )
            entry = self._value_of(value)
            entry.readers.append(node.index)
            entry.last = node.index
        self.tape.nodes.append(node)

    def _random_state(self) -> Tensor:
        return default_generator_of(self.tape.device).get_state()


def record(run: Callable[[], Any], model: nn.Module, inputs: Iterable[tuple[str, Tensor]]) -> Tape:
    """Run once and return the tape.

    Raises `Unrecordable`, and any exception of ``run``.

    Args:
        model: Model whose parameters and buffers, and the named ``inputs``, are memory into which a run must not
            write.
    """
    inputs, calls = list(inputs), OperationNamer(model)
    memories = [*model.parameters(), *model.buffers(), *(t for _, t in inputs)]
    recorder = Recorder(
        calls, memories, [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    )
    recorder.tape.device = memories[0].device if memories else torch.device("cpu")
    with KvCacheObserver(model, recorder.record_kv_cache_entry), recorder, _readbacks_told(recorder):
        output = run()
    tape = recorder.finish(output)
    for name, tensor in inputs:
        value = tape.by_storage.get(tensor.untyped_storage().data_ptr())
        if value is not None:
            tape.inputs[name] = FaultEntryPoint(0, window_of(tensor, value))
    return tape


@contextmanager
def _readbacks_told(recorder: Recorder) -> Any:
    """Context that reports to the recorder whenever Python reads a tensor without an operation."""

    def reported(name: str, method: Any) -> Any:
        @wraps(method)
        def wrapper(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if name not in SCALAR_READS or recorder.is_other_thread:
                recorder.record_readback(tensor, name)
            return method(tensor, *args, **kwargs)

        return wrapper

    def counted(maker: Any) -> Any:
        @wraps(maker)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            recorder.numbers = bool(args) and _numbers(args[0])
            try:
                return maker(*args, **kwargs)
            finally:
                recorder.numbers = False

        return wrapper

    names = (*UNSEEN, *SCALAR_READS)
    tensor_methods = {name: vars(Tensor)[name] for name in names if name in vars(Tensor)}
    makers = {name: getattr(torch, name) for name in MAKERS}
    methods = {name: getattr(Tensor, name) for name in names if callable(getattr(Tensor, name, None))}
    try:
        for name, method in methods.items():
            setattr(Tensor, name, reported(name, method))
        for name, maker in makers.items():
            setattr(torch, name, counted(maker))
        yield
    finally:
        for name, maker in makers.items():
            setattr(torch, name, maker)
        for name in methods:
            if name in tensor_methods:
                setattr(Tensor, name, tensor_methods[name])
            else:
                delattr(Tensor, name)


def _numbers(data: Any) -> bool:
    """Whether a value is a Python number, or nested lists of numbers."""
    return all(map(_numbers, data)) if type(data) in (list, tuple) else type(data) in (bool, int, float, complex)


def _without_wrapper(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
        raise Unrecordable(
            f"a tensor has type {type(tensor).__name__} and layout {tensor.layout}; expected a strided torch.Tensor"
        )
    if tensor.is_quantized or tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        raise Unrecordable("a tensor is quantised, a negating or conjugating view, or a zero tensor without memory")
    return tensor


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[tuple[ArgumentSlot, Tensor]]:
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in places:
        if isinstance(value, Tensor):
            yield ArgumentSlot(key, -1), value
        elif isinstance(value, (list, tuple)):
            yield from ((ArgumentSlot(key, i), v) for i, v in enumerate(value) if isinstance(v, Tensor))


def copyable_tensors(output: Any) -> list[Tensor]:
    """Every tensor that a copy of ``output`` would copy, without duplicates.

    Raises `Unrecordable` if the output cannot be copied.
    """
    mapping: dict[int, Tensor] = {}

    class Finder(pickle.Pickler):
        """A pickler that collects the tensors it meets and discards its output."""

        def persistent_id(self, value: Any) -> str | None:
            if not isinstance(value, Tensor):
                return None
            mapping[id(value)] = value
            return "tensor"

    try:
        Finder(io.BytesIO()).dump(output)
    except Exception as error:
        raise Unrecordable(f"the output of the run cannot be copied ({type(error).__name__}: {error})") from None
    return list(mapping.values())
