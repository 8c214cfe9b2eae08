"""Make a node's boot script: its login key, its host key, and the time at which it shuts itself down. Pure."""

from __future__ import annotations

import json
import shlex

from broker.runtime.keys import KeyPair

USER = "ubuntu"
UNCLAIMED_MINUTES = 30  # longer than any boot: the creator of a node that has no agent by then has lost it
# Enough for the sessions of 64 nodes at once, and as many pending logins (sshd's default: 10).
MAX_STARTUPS, MAX_SESSIONS = "256:30:512", 256

SCRIPT = """\
#!/bin/sh
# Written by broker for the first start of a node. Idempotent.
umask 077
user=@USER@

write() { cat >"$1.broker" && chmod "$2" "$1.broker" && mv -f "$1.broker" "$1"; }

# The host key first: until it is in place, broker refuses to connect.
mkdir -p /etc/ssh /run/sshd
write /etc/ssh/broker_host_key 600 <<'BROKER_END'
@HOST_PRIVATE@
BROKER_END
write /etc/ssh/broker_host_key.pub 644 <<'BROKER_END'
@HOST_PUBLIC@
BROKER_END
settings='HostKey /etc/ssh/broker_host_key
MaxStartups @MAX_STARTUPS@
MaxSessions @MAX_SESSIONS@'
if grep -Eqi '^[[:space:]]*Include[[:space:]]+/etc/ssh/sshd_config\\.d/' /etc/ssh/sshd_config 2>/dev/null; then
  mkdir -p /etc/ssh/sshd_config.d && chmod 755 /etc/ssh/sshd_config.d
  echo "$settings" | write /etc/ssh/sshd_config.d/00-broker.conf 644
elif ! grep -q broker_host_key /etc/ssh/sshd_config 2>/dev/null; then
  { echo "$settings"; cat /etc/ssh/sshd_config; } | write /etc/ssh/sshd_config 644
fi

id "$user" >/dev/null 2>&1 || useradd -m -s /bin/bash "$user"
case "$(getent shadow "$user" | cut -d: -f2)" in '!'*) usermod -p '*' "$user" ;; esac  # locked accounts accept no key
home=$(getent passwd "$user" | cut -d: -f6)
mkdir -p "$home/.ssh" "$home/.broker"
if ! grep -qxF @LOGIN_PUBLIC@ "$home/.ssh/authorized_keys" 2>/dev/null; then
  echo @LOGIN_PUBLIC@ >>"$home/.ssh/authorized_keys"
fi
write "$home/.broker/node.json" 600 <<'BROKER_END'
@NODE_JSON@
BROKER_END
chmod 700 "$home/.ssh" "$home/.broker" && chmod 600 "$home/.ssh/authorized_keys"
chown -R "$user:$(id -g "$user")" "$home/.ssh" "$home/.broker"
if [ "$user" != root ] && [ -d /etc/sudoers.d ]; then
  echo "$user ALL=(ALL) NOPASSWD:ALL" | write /etc/sudoers.d/90-broker 440
fi

# A lease is valid for one boot. A node that its cloud restarted (host failure, maintenance) runs no agent that could
# shut it down: unless the broker renews its lease, this service does. It also starts the watcher of an autostop rule.
mkdir -p /etc/broker && chmod 755 /etc/broker
write /etc/broker/restarted 755 <<'BROKER_END'
#!/bin/sh
if [ -s "$1/.broker/autostop.json" ]; then
  runuser -u "$2" -- env HOME="$1" python3 -I -S "$1/.broker/agent/agent.py" _restarted
fi
sleep @UNCLAIMED_S@
lease="$1/.broker/lease.json"
if [ -s "$lease" ] && ! grep -qF "$(cat /proc/sys/kernel/random/boot_id)" "$lease"; then shutdown -h now; fi
BROKER_END
mkdir -p /etc/systemd/system
write /etc/systemd/system/broker-restarted.service 644 <<BROKER_END
[Unit]
Description=Shut down a restarted node whose broker does not return
[Service]
ExecStart=/etc/broker/restarted "$home" "$user"
KillMode=process
[Install]
WantedBy=multi-user.target
BROKER_END

if command -v systemctl >/dev/null 2>&1 && [ -d /run/systemd/system ]; then
  systemctl enable broker-restarted.service 2>/dev/null  # from the next boot on
  systemctl try-reload-or-restart ssh.service sshd.service 2>/dev/null
elif [ -s /run/sshd.pid ]; then
  kill -HUP "$(cat /run/sshd.pid)"
fi

# The dead man's switch: a node that broker lost shuts itself down.
[ -d "$home/.broker/runs" ] || setsid sh -c '
  sleep "$2"
  [ -d "$1/.broker/runs" ] || shutdown -h now
' broker-unclaimed "$home" @UNCLAIMED_S@ </dev/null >/dev/null 2>&1 &
"""


def make_boot(
    *, cloud: str, login: str, host: KeyPair, user: str = USER, unclaimed_minutes: float = UNCLAIMED_MINUTES
) -> str:
    """Return the script for a node of `cloud`, to be run as root. `login` is the public key that may log in as `user`.

    The node shuts down (`shutdown -h now`) if no agent is called within `unclaimed_minutes`.
    """
    power_off = ["shutdown", "-h", "now"]
    node = {"power_off": power_off if user == "root" else ["sudo", "-n", *power_off], "notices": cloud}
    values = {
        "USER": shlex.quote(user),
        "HOST_PRIVATE": host.private.strip(),
        "HOST_PUBLIC": host.public.strip(),
        "LOGIN_PUBLIC": shlex.quote(login.strip()),
        "NODE_JSON": json.dumps(node),
        "MAX_STARTUPS": MAX_STARTUPS,
        "MAX_SESSIONS": str(MAX_SESSIONS),
        "UNCLAIMED_S": f"{unclaimed_minutes * 60:.3f}",
    }
    script = SCRIPT
    for name, value in values.items():
        script = script.replace(f"@{name}@", value)
    return script
