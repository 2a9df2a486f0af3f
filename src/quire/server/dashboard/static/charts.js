// Figures over the last two minutes, each a line that ends where it is now, under its maximum.

const SPAN = 120_000;
const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  constructor(parent, { title, format, top }) {
    Object.assign(this, { format, top, points: [] });
    this.element = document.createElement("div");
    this.element.className = "chart";
    const what = document.createElement("p");
    what.className = "what";
    what.append(title, " ", (this.value = document.createElement("b")));
    this.value.textContent = "–";
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 100 52");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    for (const y of [0.5, 51.5]) {
      const rule = document.createElementNS(SVG, "line");
      for (const [name, value] of Object.entries({ x1: 0, x2: 100, y1: y, y2: y })) rule.setAttribute(name, value);
      svg.append(rule);
    }
    this.most = document.createElement("p");
    this.most.className = "most";
    const axis = document.createElement("p");
    axis.className = "axis";
    for (const word of ["2 min ago", "1 min", "now"]) axis.append(Object.assign(document.createElement("span"), { textContent: word }));
    this.area = document.createElementNS(SVG, "path");
    this.area.setAttribute("class", "area");
    this.line = document.createElementNS(SVG, "path");
    this.line.setAttribute("class", "line");
    svg.append(this.area, this.line);
    this.element.append(what, this.most, svg, axis);
    parent.append(this.element);
  }

  // value: null where there is nothing to say, which leaves a gap
  add(at, value) {
    this.points.push([at, value]);
    while (this.points.length && this.points[0][0] < at - SPAN) this.points.shift();
    this.value.textContent = value === null ? "–" : this.format(value);
    const highest = this.top ?? Math.max(1, ...this.points.map(([, each]) => each ?? 0));
    this.most.textContent = `${this.top ? "" : "most "}${this.format(highest)}`;
    const x = (time) => 100 - ((at - time) / SPAN) * 100, y = (each) => 51 - (each / highest) * 50.5;
    let line = "", area = "", last = null;
    for (const [time, each] of this.points) {
      if (each === null) { if (last !== null) area += `L${x(last).toFixed(2)} 51.5Z`; last = null; continue; }
      const point = `${x(time).toFixed(2)} ${y(each).toFixed(2)}`;
      line += last === null ? `M${point}` : `L${point}`;
      area += last === null ? `M${x(time).toFixed(2)} 51.5L${point}` : `L${point}`;
      last = time;
    }
    if (last !== null) area += `L${x(last).toFixed(2)} 51.5Z`;
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}
