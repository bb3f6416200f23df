// SPDX-License-Identifier: Apache-2.0
// Shows /ui/state once a second. Everything that comes from the cluster is set as text, never as markup.
"use strict";

const PERIOD = 1000;
const KEY = "deltaserve-key";
const $ = (id) => document.getElementById(id);

function el(tag, options, ...children) {
  const made = document.createElement(tag);
  const { cls, title, ...rest } = options || {};
  if (cls) made.className = cls;
  if (title) made.title = title;
  Object.assign(made, rest);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const count = (n) => n.toLocaleString("en");
const bytes = (n) => {
  if (!n) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (n >= 1000 && power < units.length - 1) { n /= 1000; power += 1; }
  return `${n >= 100 || power === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[power]}`;
};
const seconds = (s) => {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`;
  return s < 90 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : `${Math.round(s / 60)} min`;
};
const ago = (s) => (s < 1 ? "now" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);
const short = (id) => (id.length > 22 ? `${id.slice(0, 19)}…` : id);

function table(id, columns, rows, empty) {
  const head = el("tr", null, ...columns.map(([name, cls, title]) => el("th", { cls, title }, name)));
  const body = rows.map((cells) => el("tr", null, ...cells.map((cell, i) => {
    const td = el("td", { cls: columns[i][1] });
    td.append(cell);
    return td;
  })));
  if (!rows.length) body.push(el("tr", null, el("td", { cls: "dim", colSpan: columns.length }, empty)));
  $(id).replaceChildren(el("thead", null, head), el("tbody", null, ...body));
}

function number(value, words) {
  return el("div", { cls: "number" }, el("b", null, value), el("span", null, words));
}

function curve(points, key) {
  const box = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  box.setAttribute("viewBox", `0 0 ${points.length} 100`);
  box.setAttribute("preserveAspectRatio", "none");
  const values = points.map((point) => point[key]).filter((value) => value !== null);
  const top = Math.max(...values, 1e-9);
  let path = "";
  let pen = false;
  points.forEach((point, x) => {
    if (point[key] === null) { pen = false; return; }
    const y = (96 - 90 * point[key] / top).toFixed(1);
    path += pen ? `L${x + 0.5} ${y}` : `M${x} ${y}L${x + 0.5} ${y}`;
    pen = true;
  });
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  box.append(line);
  return box;
}

function latency(state, key, words) {
  const found = state.latency[key];
  const block = number(seconds(found.p50), `${words} median · p90 ${seconds(found.p90)} · p99 ${seconds(found.p99)}`);
  const box = curve(state.latency.curve, key);
  return el("div", { cls: "curve" }, block, box);
}

function bar(share, words, high = 2) {
  const fill = el("i", { cls: share > high ? "high" : "" });
  fill.style.width = `${Math.round(100 * Math.min(1, share))}%`;
  return el("span", null, el("span", { cls: "bar" }, fill), words);
}

const STATE_CLASS = { ready: "good", draining: "warn", stalled: "warn", away: "bad", committed: "good", loaded: "good", failed: "bad",
  finished: "good", running: "busy", error: "bad", aborted: "dim" };
const worded = (text, cls) => el("span", { cls: cls || STATE_CLASS[text] || "busy" }, text);

function showNumbers(state) {
  const asked = state.requests;
  $("numbers").replaceChildren(
    number(count(asked.in_flight), `requests in flight · ${count(asked.queued)} queued`),
    number(asked.tokens_per_second.toFixed(0), `tokens/s · ${asked.requests_per_second.toFixed(1)} requests/s`),
    number(count(asked.ended.finished), `answered · ${count(asked.ended.aborted)} left · ${count(asked.resumed)} resumed`),
    number(count(asked.ended.error), "ended with an error"),
    latency(state, "ttft", "TTFT"),
    latency(state, "tpot", "TPOT"),
  );
}

function showPools(state) {
  const rows = [];
  for (const role of ["prefill", "decode"]) {
    for (const worker of state.pools[role]) {
      rows.push([role, el("code", null, worker.id), worded(worker.state),
        `${worker.running} / ${worker.slots || "?"}`, count(worker.waiting), count(worker.queued_tokens),
        count(worker.outstanding_tokens), bar(worker.kv_usage, `${(100 * worker.kv_usage).toFixed(1)} %`, 0.9),
        bytes(worker.state_bytes), el("code", null, worker.address), worker.error]);
    }
  }
  table("pools", [["role"], ["worker"], ["state"], ["running / slots", "n"], ["waiting", "n"],
    ["queued tokens", "n", "of prompts without a first output"], ["outstanding", "n", "tokens given by this router and not done with"],
    ["KV cache"], ["state held", "n", "bytes of the boundaries that its running requests hold"], ["address"], ["", "text"]],
  rows, "no worker has registered yet");
}

function showBoundaries(state) {
  const rows = state.boundaries.map((one) => {
    const ranks = el("span");
    for (const rank of one.ranks) {
      const words = rank.state === "failed" ? rank.failure : rank.state === "done" ? bytes(rank.bytes) : rank.state;
      ranks.append(el("span", { cls: `rank ${rank.state}`, title: `rank ${rank.rank}: ${rank.state}, ${bytes(rank.bytes)} in ${seconds(rank.seconds)}` },
        `${rank.rank} ${words}`));
    }
    return [one.outcome ? ago(one.age - one.took) : "now", one.stage, el("code", { title: one.worker }, one.worker),
      el("code", { title: one.request }, short(one.request)), count(one.tokens),
      worded(one.outcome && one.state === "failed" ? one.outcome : one.state, STATE_CLASS[one.state]),
      ranks, bytes(one.bytes), seconds(one.outcome ? one.took : one.age)];
  });
  table("boundaries", [["ended"], ["stage"], ["worker"], ["request"], ["tokens", "n"], ["state"], ["ranks"], ["bytes", "n"], ["time", "n"]],
    rows, "nothing was handed over lately");
}

function showChoices(state) {
  const all = Object.values(state.choices).reduce((sum, n) => sum + n, 0);
  const rows = Object.entries(state.choices).map(([name, n]) => [
    name === "handover" ? "handed over" : `here: ${name.replaceAll("_", " ")}`, count(n), bar(n / all, `${Math.round(100 * n / all)} %`)]);
  table("choices", [["way"], ["requests", "n"], ["share"]], rows, "no request was placed lately");
}

function showFaults(state) {
  const rows = state.faults.map((fault) => [
    ago(state.time - fault.time), worded(fault.level, fault.level === "warning" ? "warn" : "bad"),
    el("span", { title: fault.source }, fault.count > 1 ? `${fault.text} (${fault.count}×)` : fault.text)]);
  table("faults", [["ago"], ["level"], ["what", "text"]], rows, "none");
}

function showRecent(state) {
  const rows = state.recent.map((one) => [
    ago(one.age), el("code", { title: one.id }, short(one.id)), count(one.prompt), count(one.output),
    one.choice === "handover" ? "handed over" : one.choice === "local" ? `here: ${one.reason.replaceAll("_", " ")}` : one.choice,
    el("span", { cls: "dim" }, one.why || "–"),
    el("code", null, one.choice === "handover" ? `${one.prefill} → ${one.decode}` : one.decode),
    `${count(one.from_store)} / ${count(one.cached)} / ${count(one.computed)}`,
    seconds(one.ttft), seconds(one.tpot),
    el("span", { title: one.failure }, worded(one.status), one.resumes ? ` resumed ${one.resumes}×` : "",
      one.failure ? el("span", { cls: "warn" }, ` ${one.failure}`) : "")]);
  table("recent", [["ago"], ["request"], ["prompt", "n"], ["answer", "n"], ["choice"], ["why", "text"], ["workers"],
    ["store / cached / computed", "n", "where the prompt's tokens came from on the decode worker"], ["TTFT", "n"], ["TPOT", "n"], ["status"]],
  rows, "no request yet");
}

function show(state) {
  $("status").textContent = state.status;
  $("status").className = `pill ${state.status}`;
  $("about").textContent = `${state.model} · placement ${state.placement}, policy ${state.policy} · version ${state.version} · up ${ago(state.uptime)}`;
  $("missing").hidden = !state.missing.length;
  $("missing").textContent = state.missing.join(" · ");
  showNumbers(state);
  showPools(state);
  showBoundaries(state);
  showChoices(state);
  showFaults(state);
  showRecent(state);
}

async function look() {
  const key = sessionStorage.getItem(KEY);
  try {
    const reply = await fetch("/ui/state", {
      headers: key ? { Authorization: `Bearer ${key}` } : {}, signal: AbortSignal.timeout(10000) });
    $("login").hidden = reply.status !== 401;
    if (!reply.ok) throw new Error(reply.status === 401 ? "an API key is needed" : `status ${reply.status}`);
    show(await reply.json());
    document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
    $("live").textContent = `live · ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    $("status").textContent = "no answer";
    $("status").className = "pill lost";
    $("live").textContent = error.message;
  }
}

async function loop() {
  if (!document.hidden) await look();
  setTimeout(loop, PERIOD);
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  look();
});
loop();
