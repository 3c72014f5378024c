"""The shape of the mesh as a lever."""

from jaxmem.fitting.levers.lever import Lever
from jaxmem.fitting.meshes import told


class MeshLever(Lever):
    """``mesh``: names and sizes of its axes; empty: it is the one that was given, or none."""

    name, neutral = "mesh", ()
    changes_loss = own_ratio = True

    def as_is(self, workload):
        return workload.meshes.shapes[0] if workload.meshes.shapes else ()

    def values(self, workload):
        if workload.meshes.refused:
            workload.refused["mesh"] = workload.meshes.refused
        return workload.meshes.shapes or [()]

    def text(self, value):
        return f"mesh {told(value)}"
