// Replace <main> with its newest version whenever the server reports a change, and say so if that is not possible.
"use strict";
{
  let isLoading = false;
  let hasMissed = false;
  let hasFailed = false; // to load the newest version
  let newest = document.body.dataset.newest;
  const note = document.createElement("p");
  note.className = "note";
  note.setAttribute("role", "alert");
  const warn = (text) => {
    if (note.isConnected && note.textContent === text) return;
    note.textContent = text;
    document.querySelector("header").after(note);
  };
  const name = (each) =>
    each.tagName +
    (each.getAttribute("href") ?? each.getAttribute("aria-label") ?? (each.matches("button, summary") ? each.textContent : ""));
  const find = (main, wanted) => [...main.querySelectorAll(wanted.tagName)].filter((each) => name(each) === name(wanted));
  // Keep what the visitor has focused, opened and scrolled; a keyboard would otherwise start over at every change.
  const replace = (before, after) => {
    const focused = before.contains(document.activeElement) ? document.activeElement : null;
    const place = focused && find(before, focused).indexOf(focused);
    const scrolled = [...before.querySelectorAll("pre, .scroll")].map((each) => [each.scrollTop, each.scrollLeft]);
    const opened = [...before.querySelectorAll("details")].map((each) => each.open);
    before.replaceWith(after);
    after.querySelectorAll("details").forEach((each, index) => (each.open = opened[index] ?? each.open));
    after.querySelectorAll("pre, .scroll").forEach((each, index) => {
      [each.scrollTop, each.scrollLeft] = scrolled[index] ?? [0, 0];
    });
    if (focused) find(after, focused)[place]?.focus({ preventScroll: true });
  };
  const load = async () => {
    hasMissed = isLoading; // a change during a load needs another one
    const isBusy = document.activeElement && document.activeElement.closest("form");
    if (isLoading || document.hidden || isBusy) return;
    isLoading = true;
    try {
      const answer = await fetch(location.href, {
        credentials: "same-origin",
        headers: { "Broker-After": newest },
      });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        replace(document.querySelector("main"), page.querySelector("main"));
        if (changes?.readyState === EventSource.OPEN) note.remove();
      }
      hasFailed = !answer.ok;
    } catch {
      hasFailed = true; // the server cannot be reached
    } finally {
      if (hasFailed) warn("This page is not up to date; load it again.");
      isLoading = false;
      if (hasMissed) load();
    }
  };
  const job = document.body.dataset.job;
  let changes = null;
  const follow = () => {
    changes = new EventSource(`/changes?after=${newest}${job ? `&job=${job}` : ""}`);
    changes.onmessage = (change) => {
      newest = change.data;
      load();
    };
    changes.onopen = () => (hasFailed ? load() : note.remove());
    changes.onerror = () => {
      const isOver = changes.readyState === EventSource.CLOSED; // refused; otherwise the browser tries again
      warn(isOver ? "This page no longer updates; load it again." : "No connection: this page is not up to date.");
    };
  };
  // A browser opens six connections to one server, so that a seventh page would wait for a tab in the background.
  document.addEventListener("visibilitychange", () => {
    changes?.close();
    if (document.hidden) return;
    follow();
    load();
  });
  if (!document.hidden) follow();
}
