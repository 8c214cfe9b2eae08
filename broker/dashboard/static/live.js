// Replace <main> with its newest version whenever the server reports a change.
"use strict";
{
  let isLoading = false;
  let isStale = false;
  let hasMissed = false;
  let newest = document.body.dataset.newest;
  const load = async () => {
    hasMissed = isLoading; // a change during a load needs another one
    const isBusy = document.activeElement && document.activeElement.closest("form");
    isStale = isLoading || document.hidden || Boolean(isBusy);
    if (isStale) return;
    isLoading = true;
    try {
      const answer = await fetch(location.href, {
        credentials: "same-origin",
        headers: { "Broker-After": newest },
      });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const scrolled = document.querySelector("pre")?.scrollTop;
        document.querySelector("main").replaceWith(page.querySelector("main"));
        const log = document.querySelector("pre");
        if (log && scrolled !== undefined) log.scrollTop = scrolled;
      }
    } catch {
      isStale = true; // the server cannot be reached; the stream reports its return
    } finally {
      isLoading = false;
      if (hasMissed) load();
    }
  };
  const job = document.body.dataset.job;
  new EventSource(`/changes?after=${newest}${job ? `&job=${job}` : ""}`).onmessage = (change) => {
    newest = change.data;
    load();
  };
  document.addEventListener("visibilitychange", () => isStale && load());
}
