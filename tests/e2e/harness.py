"""Real vLLM engines, a router between them, and what a test needs to see and to break.

    with Nursery(logs) as nursery:
        src = nursery.start(model, connector)
        dst = nursery.start(model, connector, tensor_parallel_size=2)
        answer = ferry(src, dst, prompt)

Importing vLLM takes longer than starting an engine. So one process, the *nursery*, imports it once, and
each engine is a fork of it: this file, run as a script. An engine is a process group: the frontend, the
engine core, the workers. They run on a CPU unless the nursery is told of another device.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from tests.e2e import inside
from tests.e2e.devices import CPU, Device, device_named

Params = dict[str, Any]
"""``kv_transfer_params``, as routers pass them on."""

MLA_ARGS = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["none"]}}
"""Without them MLA in fp32 is wrong on a CPU, connector or not."""

STOCK = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
"""vLLM's own connector, which the harness itself is tested with."""
KVFERRY = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.integrations.vllm",
    "kv_role": "kv_both",
}

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router asks of the engine that prefills."""

PROMPTS = tuple(
    [(7 * index + 13 * length + index * index % 11) % 256 for index in range(length)]
    for length in (5, 64, 127, 300)
)
"""Shorter than a block, on the edge of one, where a window lets go of a block, and many blocks."""
NUM_TOKENS = 12
"""Of each answer."""
SECONDS = 120.0
"""No engine takes longer for anything, on a busy machine."""

HOST = "KVFERRY_TEST_HOST"
"""In an engine's ``env``: the network namespace that it lives in."""


class EngineError(Exception):
    """An engine refused a call, or is gone."""


@dataclass(frozen=True, slots=True)
class Sources:
    """How many prompt tokens came from where, as the engine's own metrics count them."""

    computed: int
    cached: int
    external: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of a request."""

    tokens: list[int]
    finish_reason: str | None
    params: Params | None
    """``kv_transfer_params`` for the next engine."""
    sources: Sources
    """Of this request, if it ran alone."""
    logprobs: list[float] = field(default_factory=list)
    """Of each token, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an engine thinks of a token of somebody's answer."""

    logprob: float
    shortfall: float
    """How far that is below the likeliest token's."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of layers with one block table, as the engine's scheduler has it."""

    kind: str
    block_size: int
    page_bytes: int
    num_layers: int


# ------------------------------------------------------------------------------------- the test's side


class Engine:
    """One engine, as a test sees it. Calls may overlap; ``submit`` does not wait."""

    def __init__(self, name: str, pipe: Connection, log: Path) -> None:
        self.name, self.log = name, log
        self._pipe = pipe
        self._numbers = count()
        self._waiting: dict[int, tuple[Future[Any], Callable[[Any], Any]]] = {}
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self.pid: int = pipe.recv()
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    # -- requests

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int = NUM_TOKENS,
        params: Params | None = None,
        *,
        has_logprobs: bool = False,
    ) -> Answer:
        """The greedy continuation of a prompt."""
        begun = self.begin(self.new_id(), prompt, num_tokens, params, has_logprobs=has_logprobs)
        return begun.result(SECONDS)

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        num_tokens: int = NUM_TOKENS,
        params: Params | None = None,
        *,
        has_logprobs: bool = False,
    ) -> "Future[Answer]":
        """The same, for a test that does something else meanwhile."""
        values = request_id, list(prompt), num_tokens, params, {"logprobs": 0} if has_logprobs else {}
        return self.submit("generate", *values, read=_read_answer)

    def scores(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Score]:
        """Of each token of an answer to a prompt, given those before."""
        values = self.new_id(), list(prompt), list(tokens)
        return [Score(*pair) for pair in self.call("scores", *values)]

    def new_id(self) -> str:
        """A request id that this engine has not seen."""
        return f"{self.name}-{next(self._numbers)}"

    def abort(self, request_id: str) -> None:
        self.call("abort", request_id)

    def forget(self) -> None:
        """Find no prefix of what was there before; waits until no block is in use."""
        until(lambda: self.core("forget"), f"{self.name} has forgotten its prefixes", seconds=SECONDS)

    # -- what a test may see

    def num_free_blocks(self) -> int:
        """Of the pool that all groups share."""
        return self.core("num_free_blocks")

    def groups(self) -> list[Group]:
        """Which block sizes really resulted."""
        return [Group(*values) for values in self.core("groups")]

    def sources(self) -> Sources:
        """Of all requests so far."""
        return self.submit("sources", read=lambda values: Sources(*values)).result(SECONDS)

    def num_preemptions(self) -> int:
        """Requests that lost their blocks to others, so far."""
        return self.call("num_preemptions")

    def num_accepted(self) -> int:
        """Drafted tokens that were right, so far."""
        return self.call("num_accepted")

    def kernels(self) -> set[str]:
        """The attention backends of all ranks, and the instruction set that CPU attention runs on."""
        return {name for names in self.workers("kernels") for name in names}

    def num_loads(self) -> int:
        """Loads that vLLM's metrics have of kvferry, all ranks and outcomes."""
        return self.call("num_loads")

    def num_offers(self) -> int:
        """Requests that were offered, say vLLM's metrics; those of the last moments may be missing."""
        return self.call("num_offers")

    def num_uncached_blocks(self) -> int:
        """Blocks that kvferry kept out of the prefix cache, say vLLM's metrics."""
        return self.call("num_uncached_blocks")

    def totals(self, name: str, label: str = "") -> dict[str, int]:
        """A counter of vLLM's metrics, by the values of one of its labels."""
        return self.call("totals", name, label)

    def num_reads(self) -> int:
        """Reads in flight, on all ranks."""
        return sum(status["in_flight"] for status in self.workers("status"))

    def register_seconds(self) -> float:
        """How long the connector took to be made and to register the cache, on the slowest rank."""
        return max(self.workers("register_seconds"))

    def pids(self) -> list[int]:
        """Frontend, engine core and workers; parents first."""
        return list(_descendants(self.pid))

    def tail(self, num_lines: int = 40) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    # -- what a test may break

    def spoil(self, layers: str = "") -> None:
        """Overwrite the cache with zeros, on every rank: of layers whose names have this in them."""
        if not sum(self.workers("spoil", layers)):
            raise ValueError(f"no layer of {self.name} has {layers!r} in its name")

    def stop(self) -> None:
        """Every process of it sleeps, until ``resume``."""
        self._signal(signal.SIGSTOP)

    def stop_workers(self) -> None:
        """Only those who hold the cache; with one rank they are not processes of their own."""
        workers = [pid for pid in self.pids() if "Worker" in _name(pid)]
        if not workers:
            raise EngineError(f"{self.name} has no workers of their own")
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once, all of it."""
        self._signal(signal.SIGKILL)
        self._gone.wait(SECONDS)

    def close(self) -> None:
        """End it; by force if it takes long, or is stopped."""
        self.resume()
        with contextlib.suppress(EngineError, TimeoutError):
            self.call("shutdown", seconds=20)
        self.kill()

    # -- calls

    @property
    def is_alive(self) -> bool:
        return not self._gone.is_set()

    def call(self, verb: str, *values: Any, seconds: float = SECONDS) -> Any:
        return self.submit(verb, *values).result(seconds)

    def core(self, question: str, *values: Any) -> Any:
        """What the engine core answers; ``tests.e2e.inside`` has the questions."""
        return self.call("core", question, *values)

    def workers(self, question: str, *values: Any) -> list[Any]:
        """What each worker answers."""
        return self.call("workers", question, *values)

    def submit(
        self, verb: str, *values: Any, read: Callable[[Any], Any] = lambda value: value
    ) -> "Future[Any]":
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer, read
            try:
                if self._gone.is_set():
                    raise BrokenPipeError
                self._pipe.send((number, verb, values))
            except OSError:
                del self._waiting[number]
                answer.set_exception(EngineError(f"{self.name} is gone\n{self.tail()}"))
        return answer

    def wait_ready(self) -> None:
        self.call("is_ready", seconds=3 * SECONDS)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, is_good, value = self._pipe.recv()
                answer, read = self._waiting.pop(number)
                if is_good:
                    answer.set_result(read(value))
                else:
                    answer.set_exception(EngineError(f"{self.name}: {value}\n{self.tail()}"))
        with self._lock:
            self._gone.set()
        for answer, _ in self._waiting.values():
            answer.set_exception(EngineError(f"{self.name} is gone\n{self.tail()}"))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _read_answer(values: tuple) -> Answer:
    tokens, finish_reason, params, logprobs, sources = values
    return Answer(tokens, finish_reason, params, Sources(*sources), logprobs)


class Nursery:
    """Starts engines, and ends them all."""

    def __init__(self, logs: Path, device: Device = CPU, *, site: str = "") -> None:
        """``site``: a folder of packages that come before all others, such as another vLLM."""
        self._logs, self._device = logs, device
        path = os.pathsep.join(filter(None, (site, *sys.path)))
        self._names = count()
        self._engines: list[Engine] = []
        self._directory = tempfile.TemporaryDirectory(prefix="nursery-")
        address = os.path.join(self._directory.name, "boss")
        with Listener(address, "AF_UNIX") as listener:
            with open(logs / "nursery.log", "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, address, device.name],
                    env=os.environ | device.env | {"PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._pipe = listener.accept()
        try:
            self._pipe.recv()
        except EOFError:
            raise EngineError((logs / "nursery.log").read_text()) from None

    def make(self, family: str) -> Path:
        """The directory of a tiny model."""
        self._pipe.send(("make", family, self._directory.name))
        if self._pipe.recv():
            raise EngineError(f"no tiny model of family {family}")
        return Path(self._directory.name) / family

    def start(
        self,
        model: Path,
        connector: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        **args: Any,
    ) -> Engine:
        """An engine that is ready. ``args`` are vLLM's engine arguments."""
        engine = self.begin(model, connector, env=env, **args)
        engine.wait_ready()
        return engine

    def begin(
        self,
        model: Path,
        connector: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        **args: Any,
    ) -> Engine:
        """An engine that will be ready; so that two may start at a time."""
        name = f"{model.name}-{next(self._names)}"
        log = self._logs / f"{name}.log"
        args = {**self._device.args, "model": str(model), "served_model_name": name, **args}
        if connector is not None:
            args["kv_transfer_config"] = dict(connector)
        ports = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        address = os.path.join(self._directory.name, name)
        with Listener(address, "AF_UNIX") as listener:
            self._pipe.send(("start", (address, str(log), {**ports, **(env or {})}, args)))
            engine = Engine(name, listener.accept(), log)
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.close, self._engines))
        self._pipe.close()
        self._process.wait()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ferry(
    src: Engine,
    dst: Engine,
    prompt: Sequence[int],
    num_tokens: int = NUM_TOKENS,
    *,
    between: Callable[[Params], Params] = lambda params: params,
) -> Answer:
    """What a router does: prefill here, decode there.

    ``between`` may tamper with the params, or with the engines.
    """
    return dst.ask(prompt, num_tokens, between(prefill(src, prompt)))


def prefill(src: Engine, prompt: Sequence[int]) -> Params:
    """The params that the decode engine should get."""
    answer = src.ask(prompt, 1, dict(PREFILL))
    if not answer.params:
        raise EngineError(f"{src.name} prefilled and returned no kv_transfer_params: {answer}\n{src.tail()}")
    return answer.params


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait for something that no message announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.05)


def free_port() -> int:
    """Nobody listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def lasting_port() -> int:
    """A port for an engine that is to come back there: below those that the kernel gives to whoever asks.

    One of ``free_port`` may be somebody else's by then: another case's engine, or a client's end of a call.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first_given // 2, first_given), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of 100 ports from {first_given // 2} to {first_given} is free")


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    return ""


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _descendants(int(child))


# ---------------------------------------------------------------------------------- the engine's side


def _nurse(address: str, device: Device) -> None:
    """Import what is slow, then fork an engine for each order.

    Processes that have called a GPU must not be forked. vLLM's frontend takes care that it does not: vLLM,
    too, forks its engine cores unless told otherwise. Its worker's modules promise nothing: on a GPU they are
    left to the engine core.
    """
    pids = []
    with Client(address) as boss, contextlib.suppress(EOFError):
        import vllm.v1.engine.async_llm  # noqa: F401

        if device.name == "cpu":
            device.worker_class()
        boss.send("ready")
        while True:
            match boss.recv():
                case "make", family, directory:
                    boss.send(_make(family, directory))
                case "start", order:
                    pid = os.fork()
                    if not pid:
                        boss.close()
                        _be_engine(device, *order)
                    pids.append(pid)
                case other:
                    raise ValueError(f"what is {other!r}?")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _make(family: str, directory: str) -> int:
    """In a fork, so that what is forked later starts clean."""
    from tests.support.vllm import tiny

    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        tiny.make(family, Path(directory))
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_engine(device: Device, address: str, log: str, env: dict[str, str], args: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    with open(log, "ab", buffering=0) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    host = env.pop(HOST, "")
    os.environ.update(env)
    code = 1
    try:
        if host:
            from tests.two_hosts import Host  # needs pytest, which not every machine has

            Host(host, env["VLLM_HOST_IP"]).enter()
        asyncio.run(_Frontend(Client(address), device).serve(args))
        code = 0
    finally:
        os._exit(code)


class _Frontend:
    """The frontend process of an engine: answers each call in a task of its own, with plain values."""

    def __init__(self, pipe: Connection, device: Device) -> None:
        self._pipe, self._device = pipe, device
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, args: dict[str, Any]) -> None:
        self._pipe.send(os.getpid())
        try:
            self._start(args)
        except BaseException as problem:
            self._pipe.send((*self._pipe.recv()[:1], False, f"did not start: {problem!r}"))
            raise
        loop = asyncio.get_running_loop()
        with contextlib.suppress(EOFError):
            while True:
                number, verb, values = await loop.run_in_executor(None, self._pipe.recv)
                task = asyncio.create_task(self._answer(number, getattr(self, verb), values))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._engine.shutdown()

    def _start(self, args: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._device.name == "cpu":
            inside.teach(self._device)
        else:
            os.environ[inside.TEACH] = self._device.name
        config = AsyncEngineArgs(**args).create_engine_config()
        # vLLM asks for "spawn" on a CPU, which imports everything once more in each process. With a GPU its
        # default is "fork"; it spawns where this process has called the GPU, and that is fine, too.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._engine = AsyncLLM.from_vllm_config(config)

    async def _answer(self, number: int, method: Callable[..., Any], values: tuple) -> None:
        try:
            self._pipe.send((number, True, await method(*values)))
        except Exception as problem:
            self._pipe.send((number, False, repr(problem)))

    # -- the calls

    async def is_ready(self) -> None:
        pass

    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        num_tokens: int,
        params: Params | None,
        more: Mapping[str, Any] | None = None,
    ) -> tuple:
        before = await self.sources()
        answer: tuple = [], None, None, []
        async for output in self._stream(request_id, prompt, num_tokens, params, **(more or {})):
            done = output.outputs[0]
            pairs = zip(done.token_ids, done.logprobs or [], strict=False)
            logprobs = [place[token].logprob for token, place in pairs]
            answer = list(done.token_ids), done.finish_reason, output.kv_transfer_params, logprobs
        sources = [now - then for now, then in zip(await self.sources(), before, strict=True)]
        return *answer, sources

    def _stream(
        self, request_id: str, prompt: list[int], num_tokens: int, params: Params | None = None, **more: Any
    ) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
            **more,
        )
        return self._engine.generate({"prompt_token_ids": prompt}, sampling, request_id)

    async def scores(
        self, request_id: str, prompt: list[int], tokens: list[int]
    ) -> list[tuple[float, float]]:
        """The answer is read as a part of the prompt, so that each token follows those that were answered."""
        places: list[dict[int, Any]] = []
        async for output in self._stream(request_id, prompt + tokens, 1, prompt_logprobs=1):
            places = output.prompt_logprobs[len(prompt) :]
        found = [
            (place[token].logprob, max(one.logprob for one in place.values()))
            for place, token in zip(places, tokens, strict=True)
        ]
        return [(logprob, likeliest - logprob) for logprob, likeliest in found]

    async def reject(self, request_id: str, params: Params) -> None:
        """What vLLM's HTTP server does with a request that it rejects, or that failed."""
        await self._engine.notify_kv_transfer_request_rejected(request_id, params)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def sources(self) -> list[int]:
        from prometheus_client import REGISTRY

        num_tokens = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        for metric in REGISTRY.collect():
            if metric.name == "vllm:prompt_tokens_by_source":
                for sample in metric.samples:
                    if sample.name.endswith("_total"):
                        num_tokens[sample.labels["source"]] += int(sample.value)
        return list(num_tokens.values())

    async def num_preemptions(self) -> int:
        return _metric("vllm:num_preemptions")

    async def num_accepted(self) -> int:
        return _metric("vllm:spec_decode_num_accepted_tokens")

    async def num_loads(self) -> int:
        return _metric("vllm:kvferry_loads")

    async def num_offers(self) -> int:
        return _metric("vllm:kvferry_offers")

    async def num_uncached_blocks(self) -> int:
        return _metric("vllm:kvferry_uncached_blocks")

    async def totals(self, name: str, label: str) -> dict[str, int]:
        return _totals(name, label)

    async def core(self, question: str, *values: Any) -> Any:
        """What ``inside`` answers in the engine core."""
        return await self._engine.engine_core.call_utility_async(f"_test_{question}", *values)

    async def workers(self, question: str, *values: Any) -> list[Any]:
        """What ``inside`` answers in each worker."""
        return await self._engine.collective_rpc(f"_test_{question}", args=values)

    async def timed(
        self, request_id: str, prompt: list[int], num_tokens: int, params: Params | None
    ) -> tuple:
        """The seconds after which each token came, by this process's clock; and what else is known."""
        started = time.perf_counter()
        seconds: list[float] = []
        answer: tuple = None, None, []
        async for output in self._stream(request_id, prompt, num_tokens, params):
            came = time.perf_counter() - started
            done = output.outputs[0]
            seconds += [came] * (len(done.token_ids) - len(seconds))
            answer = done.finish_reason, output.kv_transfer_params, list(done.token_ids)
        return seconds, *answer

    async def shutdown(self) -> None:
        self._engine.shutdown()


def _metric(name: str) -> int:
    return sum(_totals(name).values())


def _totals(name: str, label: str = "") -> dict[str, int]:
    from prometheus_client import REGISTRY

    totals = Counter[str]()
    for metric in REGISTRY.collect():
        if metric.name == name:
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    totals[sample.labels.get(label, "")] += int(sample.value)
    return dict(totals)


if __name__ == "__main__":
    _nurse(sys.argv[1], device_named(sys.argv[2]))
