"""Deliver one notification to one sink. Errors never show the sink's target, which may contain a secret.

Blocking clients run in threads of their own, which end with the process: a slow server delays neither the daemon's jobs
nor its exit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import smtplib
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.message import EmailMessage
from functools import partial
from pathlib import Path
from typing import IO

from broker.clock import within
from broker.config import Config
from broker.environment import make_callback_environment
from broker.errors import CloudError, TransientError, UsageError
from broker.notify.notification import Notification, Sink, SinkKind
from broker.notify.posting import (
    POST_S_MAX,
    TIMEOUT_S,
    Posting,
    check_address,
    check_host,
    is_proxied,
    name_reason,
    post,
)
from broker.notify.settings import NotifySettings, SmtpServer, resolve

COMMAND_S_MAX = 60.0
SUBJECT_CHARS_MAX = 150
OUTPUT_BYTES_MAX = 1 << 20  # of a job's callbacks; above this size, the file is truncated


async def send(config: Config, settings: NotifySettings, sink: Sink, notification: Notification) -> None:
    """Deliver a notification; return once the receiver has accepted it. Raises CloudError, UsageError.

    May be called again with the same notification; the receiver then gets the same id again.
    """
    if sink.kind is SinkKind.COMMAND:
        await _run_command(config, sink.target, notification)
    elif sink.kind is SinkKind.MAIL:
        if settings.smtp is None:
            raise UsageError("no mail server is configured: add `[notify.smtp]` to `config.toml`")
        await _run_in_thread(partial(_mail, settings.smtp, sink.target, notification))
    else:
        body = write_slack(notification) if sink.kind is SinkKind.SLACK else write_webhook(notification)
        await _post(settings, sink, body, notification.id)


def write_webhook(notification: Notification) -> Mapping[str, object]:
    """Return the JSON object that a webhook receives."""
    return {
        "id": notification.id,
        "kind": None if notification.kind is None else notification.kind.value,
        "event": notification.event.value,
        "time": datetime.fromtimestamp(notification.time_s, UTC).isoformat(timespec="seconds"),
        "job": {
            "id": notification.job_id,
            "name": notification.job_name,
            "status": None if notification.status is None else notification.status.value,
        },
        "text": notification.text,
    }


def write_slack(notification: Notification) -> Mapping[str, object]:
    """Return a message of Slack's incoming webhooks, in which three characters are escaped.

    Source: https://docs.slack.dev/messaging/formatting-message-text
    """
    text = notification.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": text}


def write_mail(sender: str, recipient: str, notification: Notification) -> EmailMessage:
    """Return a mail whose Message-ID is the notification's id, by which mail systems recognise duplicates."""
    message = EmailMessage()
    message["From"], message["To"] = sender, recipient
    message["Subject"] = notification.text.partition("\n")[0][:SUBJECT_CHARS_MAX]
    message["Date"] = datetime.fromtimestamp(notification.time_s, UTC)
    message["Message-ID"] = f"<{notification.id}@broker.invalid>"
    message.set_content(notification.text + "\n")
    return message


async def _post(settings: NotifySettings, sink: Sink, body: Mapping[str, object], id: str) -> None:
    url = resolve(sink.target)
    check = None
    if sink.is_limited and url == sink.target:  # the variables are the operator's
        check = partial(check_address, allowed=settings.allowed_networks)
        check_host(url, allowed=settings.allowed_networks)
    posting = Posting(None if check is None or is_proxied(url) else check)
    try:
        await within(_run_in_thread(partial(post, posting, url, body, id)), POST_S_MAX)
    except TimeoutError:
        raise TransientError(f"no answer within {POST_S_MAX:.0f} seconds") from None
    finally:
        posting.end()  # so that its thread ends, too


def _mail(server: SmtpServer, recipient: str, notification: Notification) -> None:
    context = ssl.create_default_context()
    try:
        is_tls = server.security == "tls"
        client = (
            smtplib.SMTP_SSL(server.host, server.port, timeout=TIMEOUT_S, context=context) if is_tls
            else smtplib.SMTP(server.host, server.port, timeout=TIMEOUT_S)
        )  # fmt: skip
        with client:
            if server.security == "starttls":
                client.starttls(context=context)
            if server.user:
                client.login(server.user, resolve(server.password.value))
            client.send_message(write_mail(server.sender, recipient, notification))
    except smtplib.SMTPResponseException as error:
        raise TransientError(f"the mail server answered with code {error.smtp_code}") from None
    except smtplib.SMTPException as error:
        raise TransientError(f"the mail server refused the message: {type(error).__name__}") from None
    except (OSError, ValueError) as error:
        raise TransientError(f"no connection to the mail server: {name_reason(error)}") from None


async def _run_in_thread(work: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failure: BaseException | None = None
        try:
            work()
        except (CloudError, UsageError) as error:
            failure = error
        except Exception as error:  # the edge of the thread; the message may contain the target
            failure = TransientError(f"not delivered: {type(error).__name__}")
        with suppress(RuntimeError):  # the loop is closed: the daemon has ended meanwhile
            loop.call_soon_threadsafe(finish, failure)

    threading.Thread(target=run, name="notify", daemon=True).start()
    await done


async def _run_command(config: Config, command: str, notification: Notification) -> None:
    """Run a callback to its end, whatever its exit code. Raises TransientError if it cannot be started."""
    variables = {
        "BROKER_EVENT_ID": notification.id,
        "BROKER_EVENT": notification.event.value,
        "BROKER_EVENT_TEXT": notification.text.replace("\0", ""),
        # SkyPilot's names (sky/jobs/controller.py)
        "SKYPILOT_TASK_ID": notification.stem,
        "JOB_ID": str(notification.job_id),
        "JOB_STATUS": "" if notification.status is None else notification.status.value,
        "TASK_ID": "0",
        "TASK_NAME": notification.job_name,
        "CLUSTER_NAME": notification.cluster,
    }
    path = config.logs / "jobs" / f"{notification.job_id}.callback.log"
    try:
        with _open_output(path) as output:
            process = await asyncio.create_subprocess_exec(
                "/bin/bash", "-c", command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env=make_callback_environment(variables), start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise TransientError(f"cannot run the callback: {error.strerror}") from None
    try:
        await within(process.wait(), COMMAND_S_MAX)
    except TimeoutError:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the command, if it still runs, and processes it left behind


def _open_output(path: Path) -> IO[bytes]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_full = path.exists() and path.stat().st_size > OUTPUT_BYTES_MAX
    mode = os.O_TRUNC if is_full else os.O_APPEND
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600), "ab")
