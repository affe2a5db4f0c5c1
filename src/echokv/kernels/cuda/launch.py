"""Cubins to running kernels: loads them on a device, launches them on torch's current stream.

A launch is one driver call with one struct as its argument, so it can be captured into a graph and
costs the CPU a few microseconds. Modules are loaded once a device, before any capture.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from echokv.errors import KernelUnavailable
from echokv.kernels.cuda.build import load_cubin

CAPABILITY = (9, 0)
MAX_SHARED_BYTES = 227 * 1024
"""What one thread block can have on Hopper."""

CARVEOUT = 58
"""Of kernels that run beside each other: percent of an SM's memory that is shared memory, 132 KB,
which `index_scores` needs; the rest is L1. An SM must be idle before it can be divided anew."""

BESIDE_SHARED_BYTES = 130 * 1024
"""What a block of one of them can have without that; each block takes one KiB more for itself."""


class Arguments(ctypes.Structure):
    """A kernel's one argument: its fields are laid out as the struct of the same name in C++."""


def pointer(tensor: torch.Tensor) -> int:
    """The address that a kernel gets, of memory of its device or of the host that it can read."""
    return tensor.data_ptr()


@dataclass
class CudaModule:
    """One source's kernels, by name, on every device that has asked for them."""

    name: str
    threads: int  # of a block
    others: Mapping[str, int] = field(default_factory=dict)  # kernels that have another number
    _functions: dict[tuple[int, str, bool], object] = field(default_factory=dict)

    def threads_of(self, kernel: str) -> int:
        """Threads of a block of one kernel."""
        return self.others.get(kernel, self.threads)

    def load(self, device: torch.device, kernels: tuple[str, ...], *, beside: bool = False) -> None:
        """Compile if need be, and load onto a device.

        Args:
            device: where the kernels will run.
            kernels: their names.
            beside: load them for launches that run beside others'.

        Raises:
            KernelUnavailable: it doesn't compile or load, with the reason.
        """
        from cuda.bindings import driver

        torch.cuda.init()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context current
            index = torch.cuda.current_device()
            error, module = driver.cuModuleLoadData(load_cubin(self.name))
            _require(error, f"loading {self.name}.cu")
            for kernel in kernels:
                error, function = driver.cuModuleGetFunction(module, kernel.encode())
                _require(error, f"finding {kernel} in {self.name}.cu")
                attribute = driver.CUfunction_attribute
                wanted = {
                    attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: MAX_SHARED_BYTES
                }
                if beside:
                    wanted[attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = CARVEOUT
                for name, value in wanted.items():
                    (error,) = driver.cuFuncSetAttribute(function, name, value)
                    _require(error, f"giving {kernel} {MAX_SHARED_BYTES} B of shared memory")
                self._functions[index, kernel, beside] = function

    def launch(
        self,
        kernel: str,
        arguments: Arguments,
        device: torch.device,
        *,
        blocks: int,
        shared_bytes: int = 0,
        cluster: int = 1,
        early: bool = False,
        beside: bool = False,
    ) -> None:
        """Launch on the device's current stream; loads the module if nothing has yet.

        Args:
            kernel: its name.
            arguments: copied before this returns.
            device: where its tensors live.
            blocks: of the grid.
            shared_bytes: dynamic shared memory of a block.
            cluster: blocks of a cluster; divides `blocks`.
            early: start it while the kernel before it ends, which it waits for itself
                (`wait_for_previous` in device.cuh).
            beside: it shares SMs with another launch that is beside (see CARVEOUT).

        Raises:
            RuntimeError: the driver refused, with its reason.
        """
        from cuda.bindings import driver

        with torch.cuda.device(device):
            function = self._function(kernel, device, beside)
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            address = ctypes.addressof(parameters)
            attributes = _attributes(driver, cluster, early)
            config = self._config(kernel, blocks, shared_bytes, attributes)
            (error,) = driver.cuLaunchKernelEx(config, function, address, 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"launching {kernel} of {self.name}.cu: {_reason(driver, error)}")

    def clusters_at_once(
        self, kernel: str, device: torch.device, *, cluster: int, shared_bytes: int
    ) -> int:
        """How many clusters of so many blocks an idle device can run together; 0: it has no place.

        More than 8 blocks need a part of the chip with as many multiprocessors left, which differs
        from one device to the next; the kernel may be launched so after this has been asked.

        Args:
            kernel: its name.
            device: where it would run.
            cluster: blocks of a cluster.
            shared_bytes: dynamic shared memory of a block.
        """
        from cuda.bindings import driver

        with torch.cuda.device(device):
            function = self._function(kernel, device, beside=False)
            names = driver.CUfunction_attribute
            allowed = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            (error,) = driver.cuFuncSetAttribute(function, allowed, 1)
            _require(error, f"letting {kernel} have clusters of {cluster} blocks")
            attributes = _attributes(driver, cluster, False)
            config = self._config(kernel, cluster, shared_bytes, attributes)
            error, count = driver.cuOccupancyMaxActiveClusters(function, config)
        return int(count) if error == driver.CUresult.CUDA_SUCCESS else 0

    def _function(self, kernel: str, device: torch.device, beside: bool):
        index = torch.cuda.current_device()
        if (index, kernel, beside) not in self._functions:
            self.load(device, (kernel,), beside=beside)
        return self._functions[index, kernel, beside]

    def _config(self, kernel: str, blocks: int, shared_bytes: int, attributes: list):
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads_of(kernel), 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


def require_hopper(device: torch.device) -> None:
    """Raise unless the kernels of this folder can run on a device.

    Raises:
        KernelUnavailable: with what is there and what is needed.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != CAPABILITY[0]:
        raise KernelUnavailable(
            f"--backend cuda is built for compute capability 9.0 (Hopper), {device} is a"
            f" {torch.cuda.get_device_name(device)} of {capability[0]}.{capability[1]}"
        )


def _attributes(driver, cluster: int, early: bool) -> list:
    names = driver.CUlaunchAttributeID
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = cluster
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    if early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    return attributes


def _require(error, what: str) -> None:
    from cuda.bindings import driver

    if error != driver.CUresult.CUDA_SUCCESS:
        raise KernelUnavailable(f"{what}: {_reason(driver, error)}")


def _reason(driver, error) -> str:
    _, text = driver.cuGetErrorString(error)
    return text.decode() if text else str(error)
