"""Teach a ClientApp the messages of this project."""

from collections.abc import Callable, Sequence
from functools import partial

from flower_adsp.clients.capability import handle_capability
from flower_adsp.clients.commit import handle_commit
from flower_adsp.clients.device import Own
from flower_adsp.clients.payload import handle_payload
from flower_adsp.clients.stock import handle_evaluate, handle_train
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_adsp.devices import DeviceProfile
from flower_adsp.errors import require
from flower_adsp.messages import NO_SECAGG, QUERY_CAPABILITY, QUERY_PAYLOAD, TRAIN_COMMIT
from flower_adsp.tasks.base import Task


def register(
    app: ClientApp,
    task: Callable[..., Task] | None = None,
    devices: Sequence[DeviceProfile] = (),
) -> ClientApp:
    """Register all handlers with `app`, and return it.

    It then answers assignments, capability queries and payloads that are timed, and Flower's own
    ``train`` and ``evaluate`` messages as well.

    Parameters
    ----------
    app : ClientApp
        Flower's app.
    task : Callable[..., Task] or None (default: None)
        Returns the task that devices train, and is called with ``seed`` if it takes that; a class
        will do. None takes the one that the run config names.
    devices : Sequence[DeviceProfile] (default: ())
        With a `task`: the devices to simulate, dealt out in turn; none takes the ``devices`` of
        the run config.
    """
    require(
        task is not None or not devices, "devices", devices, "empty without a task of the app's own"
    )
    own = None if task is None else Own(task, tuple(devices))
    # SecAgg+ lets messages pass that it does not know, and they would not be secure.
    has_secagg = any("secagg" in getattr(mod, "__name__", "") for mod in app._mods)
    app.train()(partial(handle_train, own=own))
    app.train(TRAIN_COMMIT.partition(".")[2])(
        _refuse if has_secagg else partial(handle_commit, own=own)
    )
    app.evaluate()(partial(handle_evaluate, own=own))
    app.query(QUERY_CAPABILITY.partition(".")[2])(partial(handle_capability, own=own))
    app.query(QUERY_PAYLOAD.partition(".")[2])(handle_payload)
    return app


def _refuse(message: Message, context: Context) -> Message:
    raise RuntimeError(NO_SECAGG)
