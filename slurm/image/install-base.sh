#!/bin/sh
# Turns the Debian layer into the base layer: users, the Python environment, folders.
# Reads /recipe/requirements.txt and /recipe/constraints.txt.
set -eu
for user in alice:2001 bob:2002; do
    name=${user%:*} id=${user#*:}
    groupadd --gid "$id" "$name"
    useradd --uid "$id" --gid "$id" --home-dir "/shared/home/$name" --no-create-home --shell /bin/bash "$name"
done
python3 -m venv --system-site-packages /opt/muster
/opt/muster/bin/pip install --quiet --disable-pip-version-check --no-cache-dir \
    -c /recipe/constraints.txt -r /recipe/requirements.txt
# For login shells, and for what sudo and sbatch start: the environment comes first on PATH.
printf 'PATH=/opt/muster/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n' >/etc/environment
printf 'export PATH=/opt/muster/bin:$PATH USE_LIBUV=0\n' >/etc/profile.d/muster.sh
mkdir -p /var/log/muster /var/log/slurm /var/lib/muster /etc/muster /var/spool/slurmctld /var/spool/slurmd /run/munge
chown slurm: /var/lib/muster /var/log/slurm /var/spool/slurmctld
chmod 1777 /var/log/muster
rm -rf /etc/slurm
