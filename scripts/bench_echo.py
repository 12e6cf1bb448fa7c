"""A C program that answers what it is sent, and one that asks: the least a round trip can take.

Beside it a server of asyncio's that does no more: the least that an event loop adds.
"""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static char buffer[65536];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {  /* echo PATH [NUMBER NBYTES] */
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, argv[1], sizeof address.sun_path - 1);
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    if (argc < 4) {  /* serve, one connection at a time */
        if (bind(s, (struct sockaddr *)&address, sizeof address) || listen(s, 8)) return 1;
        puts("ready");
        fflush(stdout);
        for (;;) {
            int c = accept(s, NULL, NULL);
            ssize_t got;
            while ((got = read(c, buffer, sizeof buffer)) > 0)
                if (write(c, buffer, got) != got) break;
            close(c);
        }
    }
    int number = atoi(argv[2]), nbytes = atoi(argv[3]);
    double *took = malloc(number * sizeof *took);
    if (connect(s, (struct sockaddr *)&address, sizeof address)) return 1;
    for (int i = 0; i < number; i++) {
        double begin = now();
        if (write(s, buffer, nbytes) != nbytes) return 1;
        for (int got = 0; got < nbytes;) {
            ssize_t n = read(s, buffer, sizeof buffer);
            if (n <= 0) return 1;
            got += n;
        }
        took[i] = now() - begin;
    }
    qsort(took, number, sizeof *took, compare);
    printf("%f\n", took[number / 2]);
    return 0;
}
"""

LOOP = """
import asyncio
import sys


class Echo(asyncio.BufferedProtocol):
    def __init__(self):
        self.buffer = memoryview(bytearray(1 << 16))

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, sizehint):
        return self.buffer

    def buffer_updated(self, nbytes):
        self.transport.write(bytes(self.buffer[:nbytes]))


async def main():
    server = await asyncio.get_running_loop().create_unix_server(Echo, sys.argv[1])
    print("ready", flush=True)
    await server.serve_forever()


asyncio.run(main())
"""


class Echo:
    """A running echo server."""

    def __init__(self, program: Path, path: Path) -> None:
        self.program, self._path = program, path

    def ask(self, number: int, nbytes: int) -> float:
        """Median round trip of the C client, microseconds."""
        command = [self.program, self._path, str(number), str(nbytes)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def ask_from_python(self, number: int, nbytes: int) -> list[float]:
        """Every round trip of a plain Python socket, microseconds."""
        message, took = bytes(nbytes), []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(self._path))
            for _ in range(number):
                begin = time.perf_counter_ns()
                client.sendall(message)
                client.recv(65536)
                took.append((time.perf_counter_ns() - begin) / 1e3)
        return took


@contextmanager
def echo(folder: Path) -> Iterator[Echo | None]:
    """An echo server in `folder`, or None where there is no compiler."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        yield None
        return
    source, program, path = folder / "echo.c", folder / "echo", folder / "echo.sock"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-O2", "-o", program, source], check=True)
    with _serving([str(program), str(path)]):
        yield Echo(program, path)


@contextmanager
def loop_echo(floor: Echo, folder: Path) -> Iterator[Echo]:
    """The C client of `floor`, and a server that is an event loop."""
    path = folder / "loop.sock"
    with _serving([sys.executable, "-c", LOOP, str(path)]):
        yield Echo(floor.program, path)


@contextmanager
def _serving(command: list[str]) -> Iterator[None]:
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        yield
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
