"""Meters of memory: what autograd keeps for backward, and the peak of all live tensors."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storage_key(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class SavedMeter:
    """Sums, within its context, the bytes of the tensors that autograd keeps for backward.

    Each storage counts once; those of parameters and buffers, which live anyway, do not count.

    Parameters
    ----------
    model : nn.Module
        Whose parameters and buffers do not count.
    exclude : Iterable[Tensor] (default: ())
        Further tensors that do not count.
    on_saved : Callable[[int], None] | None (default: None)
        Called with the bytes of each new storage.
    """

    def __init__(
        self,
        model: nn.Module,
        exclude: Iterable[Tensor] = (),
        on_saved: Callable[[int], None] | None = None,
    ) -> None:
        held = [*model.parameters(), *model.buffers(), *exclude]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in held}
        self._kept: list[Tensor] = []  # so that no storage is freed and its address used again
        self._on_saved = on_saved
        self.bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        address, size = _storage_key(tensor)
        if address not in self._known:
            self._known.add(address)
            self._kept.append(tensor.detach())
            self.bytes += size
            if self._on_saved is not None:
                self._on_saved(size)
        return tensor

    def __enter__(self) -> "SavedMeter":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)


def saved_bytes(
    forward: Callable[[], Tensor], model: nn.Module, exclude: Iterable[Tensor] = ()
) -> int:
    """Return the bytes that a forward pass keeps for backward, as `SavedMeter` counts them."""
    with SavedMeter(model, exclude) as meter:
        forward()
    return meter.bytes


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows, within its context, the bytes of all tensor storages that are alive.

    Parameters
    ----------
    held : Iterable[Tensor] (default: ())
        Tensors that are alive before, such as parameters; they count from the start.

    Attributes
    ----------
    live : int
        Bytes alive now.
    peak : int
        The most since the start, or since `peak` was last set.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: dict[int, int] = {}
        for tensor in held:
            self._track(tensor)

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or not size:
            return
        self._seen[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        if self._seen.pop(key, None) is not None:
            self.live -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        return result
