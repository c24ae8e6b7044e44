"""TCP ports for what tests start."""
import contextlib
import random
import socket


def free_port():
    """Below those that the kernel gives to whoever connects somewhere meanwhile."""
    with open('/proc/sys/net/ipv4/ip_local_port_range', encoding='ascii') as file:
        first = int(file.read().split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(('127.0.0.1', port))
            return port
    raise OSError('no TCP port is free')
