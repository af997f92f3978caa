"""What the packages show, and what importing them loads."""

import subprocess
import sys

import asyncrl.protocol
import asyncrl.single_controller


def test_public_names_are_sorted_and_exist():
    for package in (asyncrl.protocol, asyncrl.single_controller):
        names = package.__all__
        assert sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name)) == list(names)
        assert all(hasattr(package, name) for name in names)


def test_the_protocol_loads_neither_torch_nor_ray_and_the_controller_no_torch():
    code = (
        "import sys\n"
        "import asyncrl.protocol, asyncrl.protocol.wire\n"
        "assert not {'torch', 'ray'} & sys.modules.keys()\n"
        "import asyncrl.single_controller\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
