"""The training step that composes the levers."""

from jaxmem.training.exhausted import register_advice as register_advice
from jaxmem.training.state import TrainState as TrainState
from jaxmem.training.step import TrainStep as TrainStep
from jaxmem.training.train_steps import train_step as train_step
