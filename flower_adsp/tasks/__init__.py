"""Tasks: a model, its loss, and the data that devices and the server have for it."""

from flower_adsp.tasks.base import ClassificationTask, Split, Task

__all__ = ["ClassificationTask", "Split", "Task"]
