"use strict";
// What the pages share: bytes as text, the tip at the pointer, and a timeline to hover and zoom.
const D = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const esc = t => String(t).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[c]));
function size(n) {
  if (n < 0) return "-" + size(-n);
  if (n < 1024) return n + " B";
  const units = ["KiB", "MiB", "GiB", "TiB"]; let at = -1;
  do { n /= 1024; at++; } while (n >= 1023.995 && at < 3);
  return n.toFixed(2) + " " + units[at];
}
function tip(event, html) {
  const box = $("tip");
  if (!html) { box.style.display = "none"; return; }
  box.innerHTML = html; box.style.display = "block";
  const w = box.offsetWidth, h = box.offsetHeight;
  box.style.left = Math.max(4, event.clientX + 16 + w > innerWidth ? event.clientX - w - 14 : event.clientX + 16) + "px";
  box.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - h - 8)) + "px";
}

// The timeline of report R in an <svg>, its axis up to `most` bytes; returns what draws it again.
function timeline(svg, R, most, reset) {
  const T = R.timeline, kinds = Object.keys(D.colors).filter(k => T.live_by_kind[k]);
  const M = {l: 78, r: 14, t: 14, b: 30}, H = +svg.getAttribute("height");
  let from = 0, to = T.live.length - 1, start = null;
  const scale = () => { const w = svg.clientWidth - M.l - M.r; return {w, x: i => M.l + w * (i - from) / Math.max(1, to - from), y: v => M.t + (H - M.t - M.b) * (1 - v / (1.05 * most))}; };
  function draw() {
    const {w, x, y} = scale(); let out = "";
    for (let k = 0; k <= 4; k++) {
      const v = most * k / 4;
      out += `<line class="grid" x1="${M.l}" x2="${M.l + w}" y1="${y(v)}" y2="${y(v)}"/><text x="${M.l - 8}" y="${y(v) + 4}" text-anchor="end">${size(Math.round(v))}</text>`;
    }
    const base = new Float64Array(T.live.length), step = Math.max(1, Math.floor((to - from) / (2 * w)));
    for (const kind of kinds) {
      const row = T.live_by_kind[kind], top = [], low = [];
      for (let i = from; i <= to; i += step) {
        let at = i;
        for (let j = i; j < Math.min(i + step, to + 1); j++) if (T.live[j] > T.live[at]) at = j;
        const a = base[at], b = a + row[at], x0 = x(i).toFixed(1), x1 = x(Math.min(i + step, to)).toFixed(1);
        top.push(`${x0},${y(b).toFixed(1)} ${x1},${y(b).toFixed(1)}`); low.push(`${x1},${y(a).toFixed(1)} ${x0},${y(a).toFixed(1)}`);
      }
      out += `<polygon fill="${D.colors[kind]}" points="${top.join(" ")} ${low.reverse().join(" ")}"/>`;
      for (let i = from; i <= to; i++) base[i] += row[i];
    }
    const at = T.points.indexOf(R.peak_point);
    if (at >= from && at <= to) out += `<line x1="${x(at)}" x2="${x(at)}" y1="${M.t - 4}" y2="${H - M.b}" stroke="currentColor" stroke-dasharray="4 3"/><text x="${x(at) + (at - from < (to - from) / 2 ? 6 : -6)}" y="${M.t + 2}" text-anchor="${at - from < (to - from) / 2 ? "start" : "end"}" style="fill:currentColor;font-weight:600">peak ${size(R.peak)}</text>`;
    for (let k = 0; k <= 5; k++) { const i = Math.round(from + (to - from) * k / 5); out += `<text x="${x(i)}" y="${H - 8}" text-anchor="${k === 5 ? "end" : k ? "middle" : "start"}">${T.points[i]}</text>`; }
    svg.innerHTML = out + `<line class="cursor" y1="${M.t}" y2="${H - M.b}" stroke="currentColor" opacity=".5" visibility="hidden"/><rect class="brush" y="${M.t}" height="${H - M.t - M.b}" fill="currentColor" opacity=".12" visibility="hidden"/>`;
    reset.hidden = from === 0 && to === T.live.length - 1;
  }
  const indexAt = e => { const {w} = scale(), r = svg.getBoundingClientRect(); return Math.max(from, Math.min(to, Math.round(from + (to - from) * (e.clientX - r.left - M.l) / w))); };
  svg.addEventListener("mousedown", e => { start = indexAt(e); e.preventDefault(); });
  svg.addEventListener("mousemove", e => {
    const i = indexAt(e), {x} = scale(), c = svg.querySelector(".cursor");
    c.setAttribute("x1", x(i)); c.setAttribute("x2", x(i)); c.setAttribute("visibility", "visible");
    if (start !== null) { const b = svg.querySelector(".brush"), a = Math.min(start, i), z = Math.max(start, i); b.setAttribute("x", x(a)); b.setAttribute("width", x(z) - x(a)); b.setAttribute("visibility", "visible"); }
    tip(e, `<b>${size(T.live[i])}</b> at ${T.points[i]} of ${T.total_points} · ${esc(T.phases[i])}<br><span style="opacity:.75">${esc(T.schedule[i])}</span><table>` +
      kinds.filter(k => T.live_by_kind[k][i]).reverse().map(k => `<tr><td><i style="background:${D.colors[k]}"></i>${k}</td><td>${size(T.live_by_kind[k][i])}</td></tr>`).join("") + "</table>");
  });
  svg.addEventListener("mouseleave", () => { tip(); svg.querySelector(".cursor").setAttribute("visibility", "hidden"); });
  addEventListener("mouseup", e => {
    if (start === null) return;
    const a = Math.min(start, indexAt(e)), z = Math.max(start, indexAt(e)); start = null;
    // Drawn anew only where it changes: a click on what is gone would be no click.
    if (z - a >= 2) { from = a; to = z; draw(); } else svg.querySelector(".brush").setAttribute("visibility", "hidden");
  });
  const whole = () => { from = 0; to = T.live.length - 1; draw(); };
  svg.addEventListener("dblclick", whole); reset.addEventListener("click", whole);
  return draw;
}
function legend(box, ...reports) {
  const kinds = Object.keys(D.colors).filter(k => reports.some(r => r.timeline.live_by_kind[k]));
  box.innerHTML = kinds.reverse().map(k => `<span><i style="background:${D.colors[k]}"></i>${k}</span>`).join("");
}
