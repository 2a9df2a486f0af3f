// A fleet's replicas as a table: what its door says of them.

import { number, several } from "./words.js";

const PLACES = ["device", "host", "store"]; // where tokens are found, the nearest first
const COLUMNS = 11;

// Puts GET /fleet's answer into the rows of a table and the words above it.
export function showFleet(fleet, { body, words }) {
  const up = fleet.replicas.filter(({ state }) => state === "up").length;
  put(words, `${number(up)} of ${several(fleet.replicas.length, "replica")} up, ${several(fleet.num_resumed_streams, "stream")} went on elsewhere`);
  const there = new Map([...body.querySelectorAll("tr[data-name]")].map((row) => [row.dataset.name, row]));
  for (const replica of fleet.replicas) {
    const row = there.get(replica.name) ?? newRow(replica);
    there.delete(replica.name);
    if (!row.parentElement) body.append(row);
    row.dataset.state = replica.state;
    row.title = replica.why;
    cellsOf(replica).forEach((text, i) => put(row.children[i + 1], text));
  }
  for (const row of there.values()) row.remove();
}

function cellsOf({ state, why, load, num_streams, requests, predicted_found_tokens, real_found_tokens, found_tokens, num_event_gaps }) {
  const said = load === null ? ["–", "–", "–"] : [number(load.num_running), number(load.num_waiting), `${number(100 * load.kv_usage)} %`];
  const found = PLACES.map((place) => number(found_tokens[place] ?? 0));
  return [why ? `${state}: ${why}` : state, ...said, number(num_streams), number(requests.lost ?? 0), number(predicted_found_tokens), number(real_found_tokens), found.join(" / "), number(num_event_gaps)];
}

function newRow({ name, is_prefill }) {
  const row = document.createElement("tr"), head = document.createElement("th");
  head.scope = "row";
  head.textContent = is_prefill ? `${name} (prefill)` : name;
  row.dataset.name = name;
  row.append(head, ...Array.from({ length: COLUMNS - 1 }, (_, i) => Object.assign(document.createElement("td"), { className: i ? "num" : "state" })));
  return row;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
