"""The command in place of `python`: has the server of `warm.py` run it, and is to others what that process is.

It has the same input, output, folder and environment; signals go on to it, and its end is this one's. Imports next to nothing, as
being quick is what it is for.
"""

import json
import os
import signal
import socket
import sys


def main() -> int:
    process, came = 0, []

    def hand_on(number: int, frame: object) -> None:
        came.append(number)
        while process and came:
            os.kill(process, came.pop(0))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, hand_on)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{sys.argv[1]}")
    text = json.dumps({"argv": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    socket.send_fds(connection, [b"%10d" % len(text)], [0, 1, 2])
    connection.sendall(text)
    answers = connection.makefile("r")
    process = int(answers.readline())
    while came:
        os.kill(process, came.pop(0))
    status = int(answers.readline())
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
