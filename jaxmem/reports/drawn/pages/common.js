"use strict";
// What the pages share: bytes as text, colours that can be read, the tip, tables, and a timeline.
const D = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const esc = t => String(t).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[c]));
const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function size(n) {
  if (n < 0) return "-" + size(-n);
  if (n < 1024) return n + " B";
  let at = 0;
  do { n /= 1024; at++; } while (n >= 1023.995 && at < 4);
  return n.toFixed(2) + " " + UNITS[at];
}
// Round steps of an axis up to `most`: 1, 2 or 5 times a power of ten, about `count` of them.
function round(most, count) {
  const rough = Math.max(most / count, 1e-12), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(n => n * power).find(step => step >= rough * .999);
}
// The marks of an axis of bytes, in one unit: [[bytes, text], ...].
function byteTicks(most, count = 5, span = most) {
  const unit = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(most, 1)) / 10))), one = 1024 ** unit;
  const step = round(span / one, count), found = [];
  for (let k = 0; k * step * one <= most * 1.0001; k++) found.push([k * step * one, +(k * step).toFixed(6) + (k ? " " + UNITS[unit] : "")]);
  return found;
}

// ---- colours: text on a fill is black or white, whichever is read better
const channels = c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16));
function luminance(c) {
  const [r, g, b] = channels(c).map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
}
const ink = fill => luminance(fill) > .179 ? "#000000" : "#ffffff";
const darker = c => "#" + channels(c).map(v => Math.round(v * .72).toString(16).padStart(2, "0")).join("");

// ---- the tip: beside the box of what it explains, never over it
function tip(box, html) {
  const t = $("tip");
  if (!html) { t.style.display = "none"; return; }
  t.innerHTML = html; t.style.display = "block";
  const w = t.offsetWidth, h = t.offsetHeight, gap = 6, W = document.documentElement.clientWidth, H = innerHeight;
  const x = Math.max(4, Math.min(box.at ?? box.left, W - w - 4)), y = Math.max(4, Math.min(box.top, H - h - 4));
  const [left, top] = box.bottom + gap + h < H ? [x, box.bottom + gap] : box.top - gap - h > 0 ? [x, box.top - gap - h]
    : box.right + gap + w < W ? [box.right + gap, y] : box.left - gap - w > 0 ? [box.left - gap - w, y] : [x, H - h - 4];
  t.style.left = left + "px"; t.style.top = top + "px";
}
addEventListener("keydown", e => { if (e.key === "Escape") tip(); });

// ---- tables: headings that sort, by click and by key
function heads(row, columns, by, down, choose) {
  row.innerHTML = columns.map(([k, n, numeric]) => `<th data-k="${k}" tabindex="0" scope="col" aria-sort="${k === by ? (down ? "descending" : "ascending") : "none"}"${numeric ? ' class="n"' : ""}>${n}${k === by ? (down ? " ▾" : " ▴") : ""}</th>`).join("");
  row.querySelectorAll("th").forEach(h => pressed(h, () => { choose(h.dataset.k); row.querySelector(`[data-k="${h.dataset.k}"]`).focus(); }));
}
function pressed(element, act) {
  element.addEventListener("click", act);
  element.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(e); } });
}

// ---- the limits that a page knows: the budget, and what is usable on the target
const limits = () => [["budget", D.budget], ["usable", D.usable]].filter(([name, v]) => v && !(name === "usable" && v === D.budget));
// Those that are not far above what is drawn are lines; the others are told in words.
const inSight = most => limits().filter(([, v]) => v <= 1.6 * most);
const beyond = most => limits().filter(([, v]) => v > 1.6 * most).map(([name, v]) => `${name} ${size(v)}`).join(", ");
function limitLines(most, left, right, y) {
  return inSight(most).map(([name, v]) => `<line class="limit ${name}" x1="${left}" x2="${right}" y1="${y(v)}" y2="${y(v)}"/><text class="on" x="${left + 6}" y="${y(v) - 5}">${name} ${size(v)}</text>`).join("");
}

// The timeline of report R in an <svg>, its axis up to `most` bytes; returns what draws it again.
function timeline(svg, R, most, reset) {
  const T = R.timeline, kinds = Object.keys(D.colors).filter(k => T.live_by_kind[k]);
  const M = {l: 84, r: 14, t: 22, b: 42}, H = +svg.getAttribute("height"), end = T.live.length - 1;
  const top = 1.08 * Math.max(most, ...inSight(most).map(l => l[1]));
  let from = 0, to = end, start = null, current = Math.max(0, T.points.indexOf(R.peak_point));
  svg.tabIndex = 0; svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Live device bytes along the compiled schedule; the peak is ${size(R.peak)}. Arrow keys move along it, Escape shows all of it.`);
  const scale = () => { const w = svg.clientWidth - M.l - M.r; return {w, x: i => M.l + w * (i - from) / Math.max(1, to - from), y: v => M.t + (H - M.t - M.b) * (1 - v / top)}; };
  function draw() {
    const {w, x, y} = scale(); let out = "";
    for (const [v, text] of byteTicks(top)) out += `<line class="grid" x1="${M.l}" x2="${M.l + w}" y1="${y(v)}" y2="${y(v)}"/><text x="${M.l - 8}" y="${y(v) + 4}" text-anchor="end">${text}</text>`;
    const base = new Float64Array(T.live.length), step = Math.max(1, Math.floor((to - from) / (2 * w)));
    for (const kind of kinds) {
      const row = T.live_by_kind[kind], upper = [], lower = [];
      for (let i = from; i <= to; i += step) {
        let at = i;
        for (let j = i; j < Math.min(i + step, to + 1); j++) if (T.live[j] > T.live[at]) at = j;
        const a = base[at], b = a + row[at], x0 = x(i).toFixed(1), x1 = x(Math.min(i + step, to)).toFixed(1);
        upper.push(`${x0},${y(b).toFixed(1)} ${x1},${y(b).toFixed(1)}`); lower.push(`${x1},${y(a).toFixed(1)} ${x0},${y(a).toFixed(1)}`);
      }
      out += `<polygon fill="${D.colors[kind]}" points="${upper.join(" ")} ${lower.reverse().join(" ")}"/>`;
      for (let i = from; i <= to; i++) base[i] += row[i];
    }
    out += limitLines(most, M.l, M.l + w, y);
    const at = T.points.indexOf(R.peak_point), before = at - from < (to - from) / 2;
    // A limit just above the peak would go through its label: then that stands above the limit.
    const near = inSight(most).map(l => l[1]).filter(v => v >= R.peak && y(R.peak) - y(v) < 20), above = Math.max(R.peak, ...near);
    if (at >= from && at <= to) out += `<line x1="${x(at)}" x2="${x(at)}" y1="${y(R.peak) - 6}" y2="${H - M.b}" stroke="currentColor" stroke-dasharray="4 3"/><text class="on strong" x="${x(at) + (before ? 6 : -6)}" y="${Math.max(12, y(above) - 6)}" text-anchor="${before ? "start" : "end"}">peak ${size(R.peak)}</text>`;
    const first = T.points[from], last = T.points[to], stride = Math.max(1, round(last - first, Math.max(2, Math.min(6, w / 90))));
    for (let n = Math.ceil(first / stride) * stride; n <= last; n += stride) {
      let i = T.points.findIndex(p => p >= n); if (i < 0) i = to;
      out += `<text x="${x(Math.min(i, to))}" y="${H - M.b + 16}" text-anchor="middle">${n}</text>`;
    }
    out += `<text class="label" x="${M.l + w / 2}" y="${H - 6}" text-anchor="middle">instruction of the compiled schedule</text><text class="label" transform="translate(13 ${(H - M.b + M.t) / 2}) rotate(-90)" text-anchor="middle">live device memory</text>`;
    svg.innerHTML = out + `<line class="cursor" y1="${M.t}" y2="${H - M.b}" stroke="currentColor" opacity=".6" visibility="hidden"/><rect class="brush" y="${M.t}" height="${H - M.t - M.b}" fill="currentColor" opacity=".12" visibility="hidden"/>`;
    reset.hidden = from === 0 && to === end;
  }
  const indexAt = e => { const {w} = scale(), r = svg.getBoundingClientRect(); return Math.max(from, Math.min(to, Math.round(from + (to - from) * (e.clientX - r.left - M.l) / w))); };
  function told(i) {
    const at = T.origins && T.origins[T.origin[i]], line = at ? `<b>${esc(at.source)}</b><br>${esc(at.operation)} · ${esc(at.module)}<br>` : "";
    return `${line}${size(T.live[i])} at ${T.points[i]} of ${T.total_points} · ${esc(T.phases[i])}<br><span class="faint">XLA: ${esc(T.schedule[i])}</span><table>` +
      kinds.filter(k => T.live_by_kind[k][i]).reverse().map(k => `<tr><td><i style="background:${D.colors[k]}"></i>${k}</td><td>${size(T.live_by_kind[k][i])}</td></tr>`).join("") + "</table>";
  }
  function show(i) {
    current = i;
    const {x} = scale(), c = svg.querySelector(".cursor"), box = svg.getBoundingClientRect();
    c.setAttribute("x1", x(i)); c.setAttribute("x2", x(i)); c.setAttribute("visibility", "visible");
    tip({left: box.left, right: box.right, top: box.top, bottom: box.bottom - 4, at: box.left + x(i) - 60}, told(i));
  }
  const hide = () => { tip(); svg.querySelector(".cursor").setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerdown", e => { start = e.pointerType === "touch" ? null : indexAt(e); show(indexAt(e)); });
  svg.addEventListener("pointermove", e => {
    const i = indexAt(e), {x} = scale();
    if (start !== null) { const b = svg.querySelector(".brush"), a = Math.min(start, i), z = Math.max(start, i); b.setAttribute("x", x(a)); b.setAttribute("width", x(z) - x(a)); b.setAttribute("visibility", "visible"); }
    show(i);
  });
  svg.addEventListener("pointerleave", e => { if (e.pointerType !== "touch") hide(); });
  svg.addEventListener("blur", hide);
  const whole = () => { from = 0; to = end; draw(); };
  svg.addEventListener("keydown", e => {
    const jump = Math.max(1, Math.round((to - from) / 100)) * (e.shiftKey ? 10 : 1);
    const i = {ArrowLeft: current - jump, ArrowRight: current + jump, Home: from, End: to}[e.key];
    if (i !== undefined) { e.preventDefault(); show(Math.max(from, Math.min(to, i))); }
    if (e.key === "Escape") { whole(); hide(); }
  });
  addEventListener("pointerup", e => {
    if (start === null) return;
    const a = Math.min(start, indexAt(e)), z = Math.max(start, indexAt(e)); start = null;
    // Drawn anew only where it changes: a click on what is gone would be no click.
    if (z - a >= 2) { from = a; to = z; draw(); } else svg.querySelector(".brush").setAttribute("visibility", "hidden");
  });
  svg.addEventListener("dblclick", whole); reset.addEventListener("click", whole);
  return draw;
}
function legend(box, ...reports) {
  const kinds = Object.keys(D.colors).filter(k => reports.some(r => r.timeline.live_by_kind[k]));
  box.innerHTML = kinds.reverse().map(k => `<span><i style="background:${D.colors[k]}"></i>${k}</span>`).join("");
}
