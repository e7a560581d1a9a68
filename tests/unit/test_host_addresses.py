"""The addresses of this machine, from what the kernel prints."""

from pathlib import Path

from muster.daemon.host.addresses import own_addresses

FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
           |-- 127.0.0.1
              /32 host LOCAL
     +-- 192.0.2.0/24 2 0 2
           |-- 192.0.2.7
              /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
Local:
     +-- 198.51.100.0/24 2 0 2
           |-- 198.51.100.7
              /32 host LOCAL
           |-- 192.0.2.7
              /32 host LOCAL
"""
IF_INET6 = """\
20010db8000000000000000000000007 04 40 00 82     eth0
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


def test_every_address_but_loopback_and_link_local(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text(FIB_TRIE)
    (tmp_path / "if_inet6").write_text(IF_INET6)
    assert own_addresses(tmp_path) == ("192.0.2.7", "198.51.100.7", "2001:db8::7")


def test_a_machine_without_ipv6(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text(FIB_TRIE)
    assert own_addresses(tmp_path) == ("192.0.2.7", "198.51.100.7")


def test_this_machines_kernel_is_read() -> None:
    assert not {"127.0.0.1", "::1"} & set(own_addresses())
