"""The devices: a fast one with much memory, a middling one, and a slow one with little."""

from flwr.clientapp import ClientApp

from byo.task import Digits
from flower_adsp import DeviceProfile, register

DEVICES = [
    DeviceProfile(name="fast", seconds_per_sample=0.01, memory_mib=2.0),
    DeviceProfile(name="middling", seconds_per_sample=0.02, memory_mib=0.75),
    DeviceProfile(name="slow", seconds_per_sample=0.04, memory_mib=0.6),
]

app = register(ClientApp(), task=Digits, devices=DEVICES)
