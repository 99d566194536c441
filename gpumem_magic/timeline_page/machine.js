/* What the reader does, and what follows from it: the view, the moment that is looked at, the allocation that is chosen.

   Each action returns what must be drawn again: "all" (the stack itself), "marks" (only what lies over it) or "" (nothing). */

import { moved, showing, wholeView, zoomed } from "./model.js";

export class Machine {
  constructor(devices, categories) {
    this.devices = devices;
    this.categories = categories;
    this.choose(0);
  }

  /** Another device, or another file. */
  choose(number) {
    this.number = number;
    this.device = this.devices[number];
    this.whole = wholeView(this.device);
    this.view = this.whole;
    this.position = this.device.opensAt;
    this.selected = -1;
    return "all";
  }

  /** A category that is hidden or shown again; the others are stacked without it. */
  toggle(category) {
    this.device.hide(category, !this.device.hidden.has(category));
    this.whole = wholeView(this.device);
    this.view = { ...this.view, y0: 0, y1: this.whole.y1 };
    if (this.selected >= 0 && this.device.hidden.has(this.device.category[this.selected])) this.selected = -1;
    return "all";
  }

  goTo(position) {
    const at = Math.min(Math.max(Math.round(position), 0), this.device.events);
    const view = showing(this.view, this.whole, at);
    const redraw = view === this.view ? "marks" : "all";
    this.position = at;
    this.view = view;
    return redraw;
  }

  select(one) {
    this.selected = one;
    return "marks";
  }

  /** The selected allocation, at a moment at which it is live. */
  reveal(one) {
    this.selected = one;
    return this.device.isLive(one, this.position) ? "marks" : this.goTo(this.device.born[one] + 1);
  }

  zoom(factor, share = null, axis = "x") {
    let around = share;
    if (around === null) {
      const at = (this.position + 0.5 - this.view.x0) / (this.view.x1 - this.view.x0);
      around = axis === "y" ? 0 : at >= 0 && at <= 1 ? at : 0.5;
    }
    this.view = zoomed(this.view, this.whole, factor, around, axis);
    return "all";
  }

  /** By shares of what is in sight. */
  pan(x, y = 0) {
    const { x0, x1, y0, y1 } = this.view;
    this.view = moved(this.view, this.whole, x * (x1 - x0), y * (y1 - y0));
    return "all";
  }

  reset() {
    this.view = this.whole;
    return "all";
  }

  /** One up or down in the stack at this moment. */
  step(direction) {
    const stack = this.device.stackAt(this.position);
    if (!stack.length) return "";
    const place = stack.indexOf(this.selected);
    const next = place < 0 ? (direction > 0 ? 0 : stack.length - 1) : place + direction;
    if (next < 0 || next >= stack.length) return "";
    return this.select(stack[next]);
  }

  /** A key by its name (KeyboardEvent.key). Returns null where it means nothing here. */
  key(name, shift = false) {
    const stride = shift ? Math.max(Math.round((this.view.x1 - this.view.x0) / 10), 1) : 1;
    const { device, selected } = this;
    switch (name) {
      case "ArrowLeft": return this.goTo(this.position - stride);
      case "ArrowRight": return this.goTo(this.position + stride);
      case "ArrowUp": return shift ? this.pan(0, 0.1) : this.step(1);
      case "ArrowDown": return shift ? this.pan(0, -0.1) : this.step(-1);
      case "Home": return this.goTo(0);
      case "End": return this.goTo(device.events);
      case "PageUp": return this.pan(-0.5);
      case "PageDown": return this.pan(0.5);
      case "+": case "=": return this.zoom(0.5);
      case "-": case "_": return this.zoom(2);
      case "}": return this.zoom(0.5, null, "y");
      case "{": return this.zoom(2, null, "y");
      case "0": return this.reset();
      case "p": case "P": return this.goTo(device.peak);
      case "[": return selected < 0 ? "" : this.goTo(device.born[selected] + 1);
      case "]": return selected < 0 ? "" : this.goTo(device.freed[selected]);
      case "Escape": return this.select(-1);
      default: return null;
    }
  }
}
