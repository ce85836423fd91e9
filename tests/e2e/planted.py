"""Defects planted into packed files, with every checksum put right again: what a broken quantizer would have written."""
import struct
import zlib


class Packed:
    """A qpk file (docs/formats/qpk.md) whose tensors can be changed."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.data = bytearray(f.read())
        self.sections = [struct.unpack_from("<QQII", self.data, 48 + 24 * i) for i in range(8)]
        strings, tensors = self.sections[2], self.sections[6]
        self.records = {}
        for at in range(tensors[0], tensors[0] + tensors[1], 192):
            start, n_bytes = struct.unpack_from("<II", self.data, at)
            self.records[self.data[strings[0] + start:strings[0] + start + n_bytes].decode()] = at

    def place(self, name):
        """Offset and size of a tensor's data."""
        return struct.unpack_from("<QQ", self.data, self.records[name] + 48)

    def grid(self, name):
        """Per tile: places of the scales and of the zero points (None if there are none), and how many each has."""
        at = self.records[name]
        n_cols = struct.unpack_from("<4Q", self.data, at + 16)[1]
        group, tile_bytes, scales, zeros = struct.unpack_from("<QQQQ", self.data, at + 72)
        assert struct.unpack_from("<H", self.data, at + 68)[0] == 2, "scales are F16"
        offset, n_bytes = self.place(name)
        n = 16 * -(-n_cols // group)
        return [(tile + scales, tile + zeros if zeros else None, n) for tile in range(offset, offset + n_bytes, tile_bytes)]

    def multiply_scales(self, name, factor):
        for scales, _, n in self.grid(name):
            values = struct.unpack_from(f"<{n}e", self.data, scales)
            struct.pack_into(f"<{n}e", self.data, scales, *(factor * x for x in values))

    def shift_zeros(self, name, by):
        for _, zeros, n in self.grid(name):
            for i in range(zeros, zeros + n):
                self.data[i] = min(255, self.data[i] + by)

    def take(self, name, other):
        """The tensor of another file with the same grid."""
        (to, n_bytes), (start, n) = self.place(name), other.place(name)
        assert n == n_bytes and self.data[self.records[name] + 64:][:56] == other.data[other.records[name] + 64:][:56]
        self.data[to:to + n_bytes] = other.data[start:start + n_bytes]

    def write(self, path):
        for at in self.records.values():
            offset, n_bytes = struct.unpack_from("<QQ", self.data, at + 48)
            struct.pack_into("<I", self.data, at + 12, zlib.crc32(self.data[offset:offset + n_bytes]))
        offset, n_bytes = self.sections[6][:2]
        struct.pack_into("<I", self.data, 48 + 24 * 6 + 20, zlib.crc32(self.data[offset:offset + n_bytes]))
        struct.pack_into("<I", self.data, 252, zlib.crc32(self.data[:252]))
        with open(path, "wb") as f:
            f.write(self.data)


def layer(names, number):
    """Matrices of a layer."""
    return [n for n in names if n.startswith(f"model.layers.{number}.") and n.endswith("_proj.weight")]
