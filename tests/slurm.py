"""A Slurm of one node, this machine, for tests: daemons on free ports, everything in one folder, nothing installed.

SLURM_FOLDER names where the programs are: `/`, or a folder into which Debian's packages were unpacked:

    apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 libhwloc15 liblua5.1-0
    for package in *.deb; do dpkg -x $package FOLDER; done
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def one_node(place: Path) -> Iterator[dict[str, str]]:
    """The environment of its clients. Raises OSError or CalledProcessError where it does not come up."""
    top = Path(os.environ["SLURM_FOLDER"])
    (plugins,) = top.glob("usr/lib/*/slurm-wlm")
    (place / "state").mkdir()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [one.getsockname()[1] for one in sockets]
    host, user = socket.gethostname().partition(".")[0], subprocess.check_output(["id", "-un"], text=True).strip()
    text = CONFIG.format(host=host, user=user, ports=ports, plugins=plugins, place=place, cores=os.cpu_count())
    (place / "slurm.conf").write_text(text)
    found = os.environ | {"SLURM_CONF": str(place / "slurm.conf"), "PATH": f"{top / 'usr/bin'}:{os.environ['PATH']}"}
    found["LD_LIBRARY_PATH"] = f"{plugins.parent}:{plugins}"
    for one in sockets:
        one.close()
    daemons = [["slurmctld*", "-D"], ["slurmd*", "-D", "-d", str(next(top.glob("usr/sbin/slurmstepd*")))]]
    started = []
    try:
        for name, *flags in daemons:
            with (place / f"{name}.log").open("w") as log:
                command = [next(top.glob(f"usr/sbin/{name}")), *flags]
                started.append(subprocess.Popen(command, env=found, stdout=log, stderr=log))
        subprocess.run(["srun", "--immediate=30", "true"], env=found, check=True, capture_output=True, timeout=60)
        yield found
        subprocess.run(["scancel", "--user", user], env=found, check=True)
        subprocess.run(["srun", "--exclusive", "true"], env=found, check=True, timeout=60)  # once all jobs have ended
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(60)
