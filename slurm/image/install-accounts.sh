#!/bin/sh
# Turns the layer of the tests into that of a cluster with accounting: slurmdbd, MariaDB, and an empty database of the
# Slurm user. Reads the packages' names from /recipe/requirements.txt.
set -eu
apt-get -qq -o Acquire::Check-Valid-Until=false update
# shellcheck disable=SC2046 -- a list of package names
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(cat /recipe/requirements.txt) >/dev/null
apt-get -qq clean
rm -rf /var/lib/apt/lists/*
# Small files, and no wait for the disk: the database lives as long as its cluster. Whoever reaches the socket may do
# everything. slurmdbd does not want innodb_snapshot_isolation.
cat >/etc/mysql/accounts.cnf <<END
[mariadbd]
datadir = /var/lib/accounts
socket = /run/mysqld/mysqld.sock
skip-networking
skip-grant-tables
innodb_log_file_size = 8M
innodb_undo_tablespaces = 0
innodb_flush_log_at_trx_commit = 0
innodb_flush_method = nosync
innodb_snapshot_isolation = OFF
END
mkdir -p /var/lib/accounts
chown slurm: /var/lib/accounts
mariadb-install-db --defaults-file=/etc/mysql/accounts.cnf --user=slurm --skip-test-db >/dev/null
