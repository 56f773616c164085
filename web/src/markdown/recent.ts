/** The values that were used last; older ones are dropped. */
export class Recent<V> {
  private readonly values = new Map<string, V>();

  constructor(
    private readonly countMax: number,
    /** What has a longer key is not kept. */
    private readonly keyCharsMax = 20_000,
  ) {}

  get(key: string): V | undefined {
    const value = this.values.get(key);
    if (value !== undefined) {
      this.values.delete(key);
      this.values.set(key, value);
    }
    return value;
  }

  set(key: string, value: V): void {
    if (key.length > this.keyCharsMax) return;
    this.values.delete(key);
    this.values.set(key, value);
    if (this.values.size > this.countMax) this.values.delete(this.values.keys().next().value as string);
  }
}
