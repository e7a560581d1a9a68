"""`make audit`: are vulnerabilities known in what a release installs, or in what builds it?

pip-audit asks an advisory database over the network. Where it can't ask, it may report "no known vulnerabilities" and
exit with 0, because it skips a package that the service does not know. So this audit first asks about a version that is
known to be vulnerable. If the answer does not name it, nothing was audited, and the audit fails.

Exit status:
    0   The database answered, and knows no vulnerability of any locked version.
    1   Vulnerabilities are known; they are printed.
    69  The database can't be reached, or does not know a locked package: nothing is proved.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOCKS = [Path(__file__).with_name(name) for name in ("requirements.lock", "tools.lock")]
CANARY = "requests==2.19.0"
"""It has had published advisories since 2018 (CVE-2018-18074)."""
EXIT_VULNERABLE, EXIT_UNAVAILABLE = 1, 69
PIP_AUDIT = (sys.executable, "-m", "pip_audit")
TIMEOUT_S = 600
"""Some 80 packages, a request each."""


class NotAuditedError(Exception):
    """The advisory database gave no answer that proves anything."""


def main(options: Sequence[str] = (), pip_audit: Sequence[str] = PIP_AUDIT, locks: Sequence[Path] = LOCKS) -> int:
    """Audit `locks`, print what was found, and return the exit status.

    Args:
        options: for pip-audit, such as `-s osv`.
        pip_audit: the command.
    """
    try:
        _check_that_the_database_answers([*pip_audit, *options])
        known = [line for lock in locks for line in _vulnerabilities([*pip_audit, *options], lock)]
    except NotAuditedError as error:
        print(f"audit: NOTHING WAS AUDITED: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    for line in known:
        print(line)
    print(f"audit: {len(known)} known vulnerabilities in {', '.join(lock.name for lock in locks)}")
    return EXIT_VULNERABLE if known else 0


def _check_that_the_database_answers(command: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder, "canary.txt")
        canary.write_text(f"{CANARY}\n")
        if not _vulnerabilities([*command, "--no-deps"], canary):
            raise NotAuditedError(f"the advisory database knows no vulnerability of {CANARY}, which has some")


def _vulnerabilities(command: list[str], requirements: Path) -> list[str]:
    """One line for each known vulnerability.

    Raises:
        NotAuditedError: pip-audit failed, or skipped a package.
    """
    whole = [*command, "--disable-pip", "--progress-spinner=off", "--format=json", "-r", str(requirements)]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=TIMEOUT_S)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = done.stderr.strip().rpartition("\n")[2]
        raise NotAuditedError(f"the advisory database can't be asked: {last}") from None
    for package in packages:
        if "skip_reason" in package:
            raise NotAuditedError(package["skip_reason"])
    return [
        f"{package['name']} {package['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or '-'}"
        for package in packages
        for found in package["vulns"]
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
