// Says what a plot shows where it is pointed at. Without it the page only lacks that.
"use strict";
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const { at, titles, series } = JSON.parse(figure.dataset.hover);
  const drawings = figure.querySelector(".drawings");
  const says = document.createElement("p");
  says.className = "says";
  says.setAttribute("aria-live", "off");
  figure.append(says);
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  cursor.hidden = true;
  drawings.append(cursor);
  const show = (event) => {
    const box = drawings.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width;
    let best = 0;
    for (let index = 1; index < at.length; index += 1) {
      if (Math.abs(at[index] - place) < Math.abs(at[best] - place)) best = index;
    }
    cursor.style.left = `${at[best] * 100}%`;
    cursor.hidden = false;
    says.replaceChildren(document.createTextNode(`${titles[best]}: `));
    series.forEach(([name, texts], index) => {
      const value = document.createElement("b");
      value.textContent = texts[best];
      says.append(`${index ? ", " : ""}${name} `, value);
    });
  };
  const hide = () => { cursor.hidden = true; says.textContent = ""; };
  drawings.addEventListener("pointermove", show);
  drawings.addEventListener("pointerdown", show);
  drawings.addEventListener("pointerleave", hide);
}
