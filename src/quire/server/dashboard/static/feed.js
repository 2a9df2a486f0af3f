// The feed: server-sent events read with fetch, because a key is a header, which EventSource has not.

const KEY = "quire-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => sessionStorage.setItem(KEY, text),
  headers: () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
};

// Each event's fields, as they come. Lines may be cut anywhere.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = {};
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (event.data !== undefined) yield event;
        event = {};
      } else if (!line.startsWith(":")) {
        const colon = line.indexOf(":");
        event[line.slice(0, colon)] = line.slice(colon + 1).trimStart();
      }
    }
  }
}

// Keeps the feed open while the page is seen; the server rests while it is not.
export class Feed {
  constructor({ onAbout, onFrame, onFleet, onLink }) {
    Object.assign(this, { onAbout, onFrame, onFleet, onLink });
    this.wait = 500;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
  }

  async open() {
    this.close();
    const own = (this.aborting = new AbortController());
    while (!own.signal.aborted) {
      try {
        await this.read(own.signal);
      } catch (error) {
        if (own.signal.aborted) return;
        this.onLink("lost", error.message === "over" ? "the engine has stopped" : "no answer, trying again");
      }
      if (this.denied) return;
      await new Promise((done) => setTimeout(done, this.wait));
      this.wait = Math.min(this.wait * 2, 8000);
    }
  }

  close() {
    this.aborting?.abort();
  }

  async read(signal) {
    const answer = await fetch("memory/feed", { headers: key.headers(), signal, cache: "no-store" });
    this.denied = answer.status === 401;
    if (this.denied) { this.onLink("denied", "a key is needed"); return; }
    if (answer.status === 501) { await this.readFleet(signal); return; } // a fleet's door has no cache
    if (!answer.ok) throw new Error(String(answer.status));
    for await (const event of events(answer.body)) {
      this.wait = 500;
      if (event.event === "about") { this.onAbout(JSON.parse(event.data)); this.onLink("live", "live"); }
      if (event.event === "frame") this.onFrame(JSON.parse(event.data), Number(event.id));
      if (event.event === "over") throw new Error("over");
    }
    throw new Error("ended");
  }

  // What a fleet's door says of its replicas, once a second.
  async readFleet(signal) {
    for (;;) {
      const answer = await fetch("fleet", { headers: key.headers(), signal, cache: "no-store" });
      this.denied = answer.status === 401 || answer.status === 403;
      if (this.denied) { this.onLink("denied", "an admin key is needed"); return; }
      if (!answer.ok) throw new Error(String(answer.status));
      this.wait = 500;
      this.onFleet(await answer.json());
      this.onLink("live", "live");
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}
