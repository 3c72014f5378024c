"""The shape of the mesh as a lever."""

from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.meshes import told


class MeshLever(Lever):
    """``mesh``: names and sizes of its axes; empty: it is the one that was given, or none."""

    name, neutral = "mesh", ()
    changes_loss = own_ratio = True

    def as_is(self, problem):
        return problem.meshes.shapes[0] if problem.meshes.shapes else ()

    def values(self, problem):
        if problem.meshes.refused:
            problem.refused["mesh"] = problem.meshes.refused
        return problem.meshes.shapes or [()]

    def text(self, value):
        return f"mesh {told(value)}"
