/* A live view inside an output that is plain HTML: `<div class="gpumem-place" data-place="…">` with a still picture in it.

   The output is whole without this script. Where the kernel's model lives, its view stands in the picture's stead, in every copy
   of the output; where it does not (a reopened notebook, a restarted kernel, another page), the picture shows. */

const PROSE = "jp-RenderedHTMLCommon";

/** Puts a view into every place of that name, now and later, until the answer is called. build: (element) => its end. */
export function inPlaces(name, build) {
  const mounted = new Map(); // place -> { host, still, end }
  let pending = false, over = false;
  const leave = (place, { host, still, end, frame }) => {
    mounted.delete(place);
    frame?.classList.add(PROSE);
    end();
    host.remove();
    if (still) still.hidden = false;
  };
  const enter = (place) => {
    const still = place.querySelector(".gpumem-still");
    const before = [...mounted].find(([other]) => !other.isConnected);
    const had = document.activeElement;
    const one = before ? before[1] : { host: document.createElement("div") };
    // An output that was drawn anew keeps its view, with where the reader is in it.
    if (before) mounted.delete(before[0]);
    one.still = still;
    // Jupyter's styles for text in an output are not for a view's tables and lists.
    one.frame = place.closest?.(`.${PROSE}`);
    one.frame?.classList.remove(PROSE);
    if (still) still.hidden = true;
    place.append(one.host);
    one.end ??= build(one.host);
    mounted.set(place, one);
    if (before && one.host.contains(had)) had.focus?.();
  };
  const come = () => {
    for (const place of document.querySelectorAll(".gpumem-place")) {
      if (place.dataset.place === name && !mounted.has(place)) enter(place);
    }
  };
  const look = () => {
    pending = false;
    if (over) return;
    come();
    for (const [place, one] of [...mounted]) if (!place.isConnected) leave(place, one);
  };
  const observer = new MutationObserver(() => {
    // An output that is drawn anew has its view at once, and shows no frame of its picture.
    if ([...mounted.keys()].some((place) => !place.isConnected)) come();
    if (pending) return;
    pending = true;
    // A view leaves not before the next frame: its output may come again.
    requestAnimationFrame(look);
  });
  observer.observe(document.body, { childList: true, subtree: true });
  look();
  return (html = null) => {
    observer.disconnect();
    over = true;
    for (const [place, one] of [...mounted]) {
      leave(place, one);
      if (html !== null && one.still) one.still.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
    }
  };
}
