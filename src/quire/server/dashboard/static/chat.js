// The box that asks: OpenAI's routes, streamed, so that what it costs is seen in the picture.

import { events, key } from "./feed.js";
import { number, several } from "./words.js";

const MOST = 4; // answers that stay

export class Chat {
  constructor({ form, prompt, maxTokens, two, stop, answers }) {
    Object.assign(this, { prompt, maxTokens, stop, answers, under: new Set(), chats: true });
    form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    two.addEventListener("click", () => { this.ask(); this.ask(); });
    stop.addEventListener("click", () => this.under.forEach((one) => one.abort()));
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.ask(); }
    });
  }

  async ask() {
    if (!this.prompt.value.trim()) { this.prompt.focus(); return; }
    const answer = document.createElement("article"), note = document.createElement("p"), text = document.createElement("pre");
    answer.className = "answer";
    text.tabIndex = 0;
    note.textContent = "waiting";
    answer.append(note, text);
    this.answers.prepend(answer);
    while (this.answers.children.length > MOST) this.answers.lastChild.remove();
    const own = new AbortController();
    this.under.add(own);
    this.stop.disabled = false;
    try {
      await this.read(own.signal, note, text);
    } catch (error) {
      note.textContent = own.signal.aborted ? "stopped" : error.message;
      answer.classList.toggle("refused", !own.signal.aborted);
    }
    this.under.delete(own);
    this.stop.disabled = !this.under.size;
  }

  async read(signal, note, text) {
    const asked = this.prompt.value;
    const answer = await fetch(this.chats ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      signal,
      headers: { "content-type": "application/json", ...key.headers() },
      body: JSON.stringify({
        ...(this.chats ? { messages: [{ role: "user", content: asked }] } : { prompt: asked }),
        max_tokens: Number(this.maxTokens.value) || 160,
        temperature: 0.8,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!answer.ok) {
      const said = await answer.json().catch(() => ({}));
      throw new Error(said.error?.message ?? `the server answered ${answer.status}`);
    }
    let count = 0, usage = null;
    for await (const event of events(answer.body)) {
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices?.[0]?.delta?.content ?? chunk.choices?.[0]?.text ?? "";
      if (piece) { text.append(piece); count += 1; text.scrollTop = text.scrollHeight; }
      if (chunk.usage) usage = chunk.usage;
      note.textContent = `${several(count, "piece")} so far`;
    }
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      note.textContent = `${several(usage.completion_tokens, "token")}; of ${number(usage.prompt_tokens)} in the prompt, ${number(cached)} found cached`;
    } else note.textContent = "done";
  }
}
